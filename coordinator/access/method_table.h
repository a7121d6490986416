// Which role may call which method: the one place that says so. A method without a row is refused.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "coordinator/access/caller.h"

namespace ringleader::access {

// `path`: "/ringleader.v1.JobService/CreateJob". PERMISSION_DENIED says who may, UNAUTHENTICATED
// asks a caller that is nobody to say who it is.
absl::Status CheckMethod(std::string_view path, const Caller& caller);

// The part of this that is decided before a call reaches a handler: a method that no handler of the
// coordinator serves, for whatever role, and a caller that is nobody.
absl::Status CheckBeforeHandler(std::string_view path, const Caller& caller);

// "JobService.CreateJob" for "/ringleader.v1.JobService/CreateJob": what people read.
std::string ShortMethod(std::string_view path);

}  // namespace ringleader::access
