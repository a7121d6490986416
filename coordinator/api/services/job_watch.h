// JobService.WatchJob.
#pragma once

#include <grpcpp/support/server_callback.h>

#include "coordinator/api/calls/pulled_stream.h"
#include "ringleader/v1/job_service.pb.h"

namespace ringleader::api {

// Takes what it needs of `request`; deletes itself when done.
grpc::ServerWriteReactor<v1::WatchJobResponse>* NewJobWatch(
    StreamHub* hub, const grpc::CallbackServerContext& context, const v1::WatchJobRequest& request);

}  // namespace ringleader::api
