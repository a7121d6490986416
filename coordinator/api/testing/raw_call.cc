#include "coordinator/api/testing/raw_call.h"

#include <grpcpp/generic/generic_stub.h>

#include <chrono>

#include "absl/synchronization/notification.h"

namespace ringleader::api::testing {

grpc::Status CallRaw(const std::shared_ptr<grpc::Channel>& channel, const std::string& path,
                     const std::string& message, bool* is_answered) {
  struct Call : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
    void OnReadDone(bool ok) override {
      answered = ok;
      if (ok) context.TryCancel();
    }
    void OnDone(const grpc::Status& status) override {
      ended = status;
      done.Notify();
    }
    grpc::ClientContext context;
    grpc::ByteBuffer reply;
    bool answered = false;
    grpc::Status ended;
    absl::Notification done;
  } call;
  call.context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  grpc::GenericStub stub(channel);
  stub.PrepareBidiStreamingCall(&call.context, path, {}, &call);
  const grpc::Slice slice(message);
  const grpc::ByteBuffer request(&slice, 1);
  call.StartRead(&call.reply);
  call.StartWriteLast(&request, {});
  call.StartCall();
  call.done.WaitForNotification();
  if (is_answered != nullptr) *is_answered = call.answered;
  return call.ended;
}

}  // namespace ringleader::api::testing
