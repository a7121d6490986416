// LogService: the store's logs, as they grow.
#pragma once

#include "coordinator/api/calls/pulled_stream.h"
#include "ringleader/v1/log_service.grpc.pb.h"

namespace ringleader::api {

class LogService : public v1::LogService::CallbackService {
 public:
  explicit LogService(StreamHub* hub) : hub_(hub) {}

  grpc::ServerWriteReactor<v1::TailLogsResponse>* TailLogs(
      grpc::CallbackServerContext* context, const v1::TailLogsRequest* request) override;

 private:
  StreamHub* const hub_;
};

}  // namespace ringleader::api
