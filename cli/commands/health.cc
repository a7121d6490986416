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

// grpc.health.v1.HealthCheckRequest: service = 1; the whole server where there is none.
constexpr int kServiceField = 1;

// Debian's gRPC brings the health service without its messages: a request is one name or empty, and
// the reply one number.
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

// Whether a service serves; "": the server.
absl::StatusOr<bool> Serves(const Context& context, grpc::TemplatedGenericStub<Empty, Empty>& stub,
                            const std::string& service) {
  grpc::ClientContext call;
  call.set_deadline(std::chrono::system_clock::now() + kDeadline);
  Empty request, reply;
  if (!service.empty()) {
    request.GetReflection()->MutableUnknownFields(&request)->AddLengthDelimited(kServiceField,
                                                                                service);
  }
  std::promise<grpc::Status> done;
  stub.UnaryCall(&call, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &request, &reply,
                 [&done](const grpc::Status& status) { done.set_value(status); });
  const grpc::Status status = done.get_future().get();
  // An earlier release says nothing of its services.
  if (!service.empty() && status.error_code() == grpc::StatusCode::NOT_FOUND) return true;
  if (!status.ok()) {
    RETURN_IF_ERROR(CheckTls(context));
    return absl::UnavailableError(
        absl::StrCat("no coordinator answers at ", context.address, ": ", status.error_message()));
  }
  return IsServing(reply);
}

// Asks once: whoever probes decides how often to try again.
absl::StatusOr<int> Health(const Context& context) {
  ASSIGN_OR_RETURN(const auto channel,
                   OpenChannel(context.address, context.tls, context.token, {}));
  grpc::TemplatedGenericStub<Empty, Empty> stub(channel);
  ASSIGN_OR_RETURN(const bool serves, Serves(context, stub, ""));
  if (!serves) {
    return absl::UnavailableError(
        absl::StrCat("the coordinator at ", context.address, " is starting or stopping"));
  }
  // That it takes none is no reason to start it again: exit code 0.
  ASSIGN_OR_RETURN(const bool takes_jobs, Serves(context, stub, "ringleader.v1.JobService"));
  PrintJson(context,
            {{"address", context.address}, {"status", "SERVING"}, {"takes_jobs", takes_jobs}},
            [&](std::ostream& out) {
              out << context.address << " serves"
                  << (takes_jobs ? "" : "; it takes no jobs: ringctl list says why") << "\n";
            });
  return kOk;
}

}  // namespace

void AddHealthCommand(CLI::App& app, Context* context) {
  CLI::App* health = app.add_subcommand("health", "whether the coordinator serves: exit code 0");
  health->callback([=] { context->action = [=] { return Health(*context); }; });
}

}  // namespace ringleader::cli
