// ringctl health: whether a coordinator serves, for probes and scripts.
#include <google/protobuf/empty.pb.h>
#include <google/protobuf/unknown_field_set.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <future>
#include <nlohmann/json.hpp>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "base/net/channel.h"
#include "base/status_macros.h"
#include "cli/client.h"
#include "cli/commands/commands.h"
#include "cli/printer.h"

namespace ringleader::cli {
namespace {

using google::protobuf::Empty;

constexpr std::chrono::seconds kDeadline{5};
// grpc.health.v1.HealthCheckResponse: status = 1, with SERVING = 1.
constexpr int kStatusField = 1;
constexpr uint64_t kServing = 1;

// Debian's gRPC brings the health service without its messages: the request for the whole server
// is empty, and the reply one number.
bool IsServing(const Empty& reply) {
  const google::protobuf::UnknownFieldSet& fields = reply.GetReflection()->GetUnknownFields(reply);
  for (int i = 0; i < fields.field_count(); ++i) {
    const google::protobuf::UnknownField& field = fields.field(i);
    if (field.number() == kStatusField &&
        field.type() == google::protobuf::UnknownField::TYPE_VARINT) {
      return field.varint() == kServing;
    }
  }
  return false;
}

// Asks once: whoever probes decides how often to try again.
absl::StatusOr<int> Health(const Context& context) {
  ASSIGN_OR_RETURN(const auto channel,
                   OpenChannel(context.address, context.tls, context.token, {}));
  grpc::TemplatedGenericStub<Empty, Empty> stub(channel);
  grpc::ClientContext call;
  call.set_deadline(std::chrono::system_clock::now() + kDeadline);
  const Empty request;
  Empty reply;
  std::promise<grpc::Status> done;
  stub.UnaryCall(&call, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &request, &reply,
                 [&done](const grpc::Status& status) { done.set_value(status); });
  const grpc::Status status = done.get_future().get();
  if (!status.ok()) {
    RETURN_IF_ERROR(CheckTls(context));
    return absl::UnavailableError(
        absl::StrCat("no coordinator answers at ", context.address, ": ", status.error_message()));
  }
  if (!IsServing(reply)) {
    return absl::UnavailableError(
        absl::StrCat("the coordinator at ", context.address, " is starting or stopping"));
  }
  PrintJson(context, {{"address", context.address}, {"status", "SERVING"}},
            [&](std::ostream& out) { out << context.address << " serves\n"; });
  return kOk;
}

}  // namespace

void AddHealthCommand(CLI::App& app, Context* context) {
  CLI::App* health = app.add_subcommand("health", "whether the coordinator serves: exit code 0");
  health->callback([=] { context->action = [=] { return Health(*context); }; });
}

}  // namespace ringleader::cli
