#include "tests/support/coordinator_process.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/testing/metrics_page.h"

namespace ringleader::testing {

CoordinatorProcess::CoordinatorProcess(std::vector<std::string> extra_flags, bool check_files)
    : extra_flags_(std::move(extra_flags)), check_files_(check_files) {}

void CoordinatorProcess::Spawn() {
  std::vector<std::string> flags = {
      "--listen",         address(),         "--data-dir",    data_dir(),
      "--metrics-listen", metrics_address(), "--check-files", check_files_ ? "true" : "false"};
  flags.insert(flags.end(), extra_flags_.begin(), extra_flags_.end());
  process_ = std::make_unique<Process>(ProgramPath("ringleader-coordinator"), flags,
                                       File(absl::StrCat("coordinator-", ++starts_, ".log")));
}

bool CoordinatorProcess::Start() {
  Spawn();
  Eventually([&] { return !process_->Running() || Serving(); });
  return process_->Running() && Serving();
}

std::string CoordinatorProcess::address() const {
  return absl::StrCat("127.0.0.1:", port_);
}
std::string CoordinatorProcess::metrics_address() const {
  return absl::StrCat("127.0.0.1:", metrics_port_);
}

std::shared_ptr<grpc::Channel> CoordinatorProcess::Channel() const {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address(), grpc::InsecureChannelCredentials(), arguments);
}

std::unique_ptr<grpc::ClientContext> CoordinatorProcess::Context() {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  return context;
}

bool CoordinatorProcess::Serving() const {
  v1::ListNodesResponse response;
  return v1::NodeService::NewStub(Channel())->ListNodes(Context().get(), {}, &response).ok();
}

std::string CoordinatorProcess::Metrics() const {
  return MetricsPage(metrics_address());
}

v1::JobSpec TestJob(const std::string& name, uint32_t trainers, uint64_t steps) {
  v1::JobSpec spec;
  spec.set_name(name);
  spec.mutable_model()->set_config("/job/config.json");
  spec.mutable_model()->set_init("random");
  spec.mutable_data()->set_train("/job/train");
  spec.mutable_data()->set_eval("/job/eval");
  spec.mutable_data()->set_sequence_length(uint64_t{4096} * trainers);
  spec.mutable_attention()->set_pattern(v1::AttentionSpec::DENSE);
  spec.mutable_parallelism()->set_context(trainers);
  spec.mutable_parallelism()->set_data(1);
  spec.mutable_training()->set_steps(steps);
  spec.mutable_checkpoint()->set_directory("/job/checkpoints/" + name);
  spec.mutable_resources()->set_trainers(trainers);
  return spec;
}

}  // namespace ringleader::testing
