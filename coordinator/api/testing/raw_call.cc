#include "coordinator/api/testing/raw_call.h"

#include <grpcpp/generic/generic_stub.h>

#include <chrono>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "ringleader/v1/access_service.pb.h"
#include "ringleader/v1/job_service.pb.h"
#include "ringleader/v1/log_service.pb.h"
#include "ringleader/v1/node_service.pb.h"
#include "ringleader/v1/worker_control.pb.h"

namespace ringleader::api::testing {

std::map<std::string, const google::protobuf::MethodDescriptor*> ServedMethods() {
  std::map<std::string, const google::protobuf::MethodDescriptor*> methods;
  for (const auto* file :
       {v1::CreateJobRequest::descriptor()->file(), v1::ListNodesRequest::descriptor()->file(),
        v1::CreateTokenRequest::descriptor()->file(), v1::WorkerMessage::descriptor()->file(),
        v1::TailLogsRequest::descriptor()->file()}) {
    for (int s = 0; s < file->service_count(); ++s) {
      const auto& service = *file->service(s);
      for (int m = 0; m < service.method_count(); ++m) {
        methods[absl::StrCat("/", service.full_name(), "/", service.method(m)->name())] =
            service.method(m);
      }
    }
  }
  return methods;
}

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
