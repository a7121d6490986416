// What tests of attention on a GPU begin with: the GPU, and settings that choose a part of what is
// visible.
#pragma once

#include <gtest/gtest.h>

#include "kernels/ops/cuda_call.h"
#include "patterns/attention_options.h"
#include "worker/attention/testing/gpu_rings.h"

namespace ringleader::attention::testing {

class CudaAttentionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (GpuCount() == 0) GTEST_SKIP() << "no GPU on this machine";
    ASSERT_EQ(kernels::ops::LoadTorchCuda(), absl::OkStatus());
  }
};

inline patterns::AttentionOptions TopP() {
  return {.pattern = patterns::Pattern::kVerticalSlash,
          .budget = {.vertical_mass = 0.5, .slash_mass = 0.4, .max_verticals = 256},
          .sink_tokens = 8,
          .tile = 64};
}

// Queries keep few enough blocks to be gathered.
inline patterns::AttentionOptions Moba() {
  return {.pattern = patterns::Pattern::kMoba, .block_size = 128, .topk_blocks = 2, .tile = 64};
}
// They keep most blocks, whose tiles are visited whole.
inline patterns::AttentionOptions MobaOfMost() {
  return {.pattern = patterns::Pattern::kMoba, .block_size = 128, .topk_blocks = 7, .tile = 64};
}

inline patterns::AttentionOptions XAttention() {
  return {.pattern = patterns::Pattern::kXAttention, .threshold = 0.5, .tile = 64};
}

inline patterns::AttentionOptions AdaSpa() {
  return {.pattern = patterns::Pattern::kAdaSpa, .adapt_heads = true, .density = 0.3, .tile = 64};
}

inline patterns::AttentionOptions FixedBlocks() {
  return {.pattern = patterns::Pattern::kFixedBlocks,
          .local_blocks = 1,
          .stride_blocks = 5,
          .tile = 64};
}

}  // namespace ringleader::attention::testing
