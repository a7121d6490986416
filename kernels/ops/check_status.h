// Status becomes c10::Error here: what LibTorch calls, and what is called as LibTorch is, throws.
#pragma once

#include <c10/util/Exception.h>

#include <string>

#include "absl/status/status.h"

namespace ringleader::kernels::ops {

// Throws c10::Error with the message of a status that is not OK.
inline void Check(const absl::Status& status) {
  TORCH_CHECK(status.ok(), std::string(status.message()));
}

}  // namespace ringleader::kernels::ops
