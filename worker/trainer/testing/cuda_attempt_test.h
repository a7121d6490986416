// Whole attempts on GPUs: real ringleader-trainer processes on a small model, one GPU a rank. With
// RINGLEADER_RANKS_PER_GPU=N as many ranks may share a GPU where there are too few: NCCL takes them
// for ranks of N hosts, and goes through the network between those.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "worker/trainer/testing/attempt_test.h"

namespace ringleader::trainer::testing {

// A job in shapes that the kernels take.
inline constexpr char kGpuConfig[] = R"({
  "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 264,
  "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
  "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
  "rope_theta": 10000.0, "tie_word_embeddings": true, "hidden_act": "silu"
})";
inline constexpr double kBfloat16Noise = 0.01;  // relative, of a loss over these few steps

inline int Gpus() {
  int gpus = 0;
  return cudaGetDeviceCount(&gpus) == cudaSuccess ? gpus : 0;
}

inline int RanksPerGpu() {
  const char* const ranks = std::getenv("RINGLEADER_RANKS_PER_GPU");
  return ranks == nullptr ? 1 : std::atoi(ranks);
}

class CudaAttemptTest : public AttemptTest {
 protected:
  // The job on this many GPUs.
  v1::JobSpec GpuJob(int context, int data = 1) {
    v1::JobSpec spec = Job(context, data);
    std::ofstream(Path("config.json")) << kGpuConfig;
    spec.mutable_data()->set_sequence_length(2048);
    spec.mutable_attention()->set_tile(128);
    spec.mutable_attention()->set_sink_tokens(128);
    spec.mutable_training()->set_learning_rate(1e-3);
    spec.mutable_resources()->set_engine(v1::ResourcesSpec::CUDA);
    return spec;
  }

  int Hosts(int ranks) const override { return ranks > Gpus() ? RanksPerGpu() : 1; }

  static void NeedGpus(int count) {
    if (Gpus() * RanksPerGpu() < count) {
      GTEST_SKIP() << "needs " << count << " GPUs, has " << Gpus() << " for " << RanksPerGpu()
                   << " ranks each";
    }
  }

  static void ExpectNear(const std::vector<double>& losses, const std::vector<double>& expected,
                         double noise = kBfloat16Noise) {
    ASSERT_EQ(losses.size(), expected.size());
    double largest = 0;
    for (size_t i = 0; i < losses.size(); ++i) {
      EXPECT_NEAR(losses[i], expected[i], noise * expected[i]) << "step " << i + 1;
      largest = std::max(largest, std::abs(losses[i] / expected[i] - 1));
    }
    std::printf("largest difference of %zu losses: %.2e of the loss, %.4f at last\n", losses.size(),
                largest, losses.back());
  }
};

#define NEED_GPUS(count) \
  NeedGpus(count);       \
  if (IsSkipped()) return

}  // namespace ringleader::trainer::testing
