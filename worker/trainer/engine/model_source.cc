#include "worker/trainer/engine/model_source.h"

#include <algorithm>
#include <thread>

#include "base/numbers/ceil_div.h"

namespace ringleader::trainer {

bool HasRandomInit(const TrainingJob& job) {
  return job.model_init == "random";
}

std::string ConfigPath(const TrainingJob& job) {
  return HasRandomInit(job) ? job.model_config : job.model_init + "/config.json";
}

absl::StatusOr<model::ModelConfig> LoadConfig(const TrainingJob& job) {
  return model::LoadModelConfig(ConfigPath(job));
}

// Starts threads of its own: at::parallel_for is a template over OpenMP and has one thread in
// programs that are built without it.
void DrawWeights(const TrainingJob& job, const model::ModelConfig& config,
                 const model::ParameterLayout& layout, int64_t first, int64_t count,
                 float* values) {
  const int64_t piece = CeilDiv(count, job.threads);
  std::vector<std::thread> threads;
  for (int64_t begin = 0; begin < count; begin += piece) {
    threads.emplace_back([&, begin] {
      model::InitializeParameters(config, layout, job.seed, first + begin,
                                  std::min(piece, count - begin), values + begin);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

std::vector<int> RingRanks(const TrainingJob& job) {
  const auto [share, member] = job.head_place();
  std::vector<int> ranks(job.ring_ranks());
  for (int i = 0; i < job.ring_ranks(); ++i) {
    ranks[i] = job.rank / job.context * job.context + i * share + member;
  }
  return ranks;
}

std::vector<int> HeadRanks(const TrainingJob& job) {
  const auto [share, member] = job.head_place();
  std::vector<int> ranks(share);
  for (int i = 0; i < share; ++i) ranks[i] = job.rank - member + i;
  return ranks;
}

}  // namespace ringleader::trainer
