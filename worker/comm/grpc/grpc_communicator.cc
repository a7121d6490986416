#include "worker/comm/grpc/grpc_communicator.h"

#include <utility>

#include "base/status_macros.h"
#include "worker/comm/group_communicator.h"
#include "worker/comm/grpc/grpc_transport.h"

namespace ringleader::comm {

absl::StatusOr<std::unique_ptr<GrpcListener>> GrpcListener::Listen(
    const GrpcCommunicatorOptions& options) {
  auto transport = std::make_shared<GrpcTransport>(options);
  RETURN_IF_ERROR(transport->Listen());
  return std::unique_ptr<GrpcListener>(new GrpcListener(std::move(transport)));
}

GrpcListener::GrpcListener(std::shared_ptr<GrpcTransport> transport)
    : transport_(std::move(transport)) {}

GrpcListener::~GrpcListener() = default;

const std::string& GrpcListener::address() const {
  return transport_->address();
}

absl::StatusOr<std::unique_ptr<Communicator>> GrpcListener::Connect(
    const std::vector<std::string>& addresses, const std::vector<std::string>& certificates) {
  RETURN_IF_ERROR(transport_->Connect(addresses, certificates));
  return std::make_unique<GroupCommunicator>(transport_);
}

bool GrpcListener::AwaitAbortHeard() {
  return transport_->WaitForAbortToBeHeard();
}

void GrpcListener::Abort(const std::string& reason) {
  transport_->Abort(reason);
}

}  // namespace ringleader::comm
