#include "worker/trainer/model_source.h"

namespace ringleader::trainer {

bool HasRandomInit(const TrainingJob& job) {
  return job.model_init == "random";
}

absl::StatusOr<model::ModelConfig> LoadConfig(const TrainingJob& job) {
  return model::LoadModelConfig(HasRandomInit(job) ? job.model_config
                                                   : job.model_init + "/config.json");
}

std::vector<int> ContextRanks(const TrainingJob& job) {
  std::vector<int> ranks(job.context);
  for (int i = 0; i < job.context; ++i) ranks[i] = job.rank / job.context * job.context + i;
  return ranks;
}

attention::AttentionOptions AttentionOptionsOf(const TrainingJob& job) {
  attention::AttentionOptions options = job.attention;
  options.layout = job.plan.layout;
  options.stripe = job.plan.stripe;
  options.ring = job.plan.ring;
  options.threads = job.threads;
  return options;
}

}  // namespace ringleader::trainer
