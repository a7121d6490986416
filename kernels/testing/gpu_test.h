// What the tests of the kernels share: a device or a skip, and a fresh seed that is recorded.
#pragma once

#include <cuda_bf16.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "kernels/testing/device_buffer.h"

namespace ringleader::kernels {

class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HaveGpu()) GTEST_SKIP() << "no GPU on this machine";
    seed_ = std::random_device()();
    random_.seed(seed_);
    RecordProperty("seed", static_cast<int>(seed_));
  }

  std::vector<__nv_bfloat16> Normal(int64_t count, double scale = 1.0, double mean = 0.0) {
    std::normal_distribution<double> normal(mean, scale);
    std::vector<__nv_bfloat16> out(static_cast<size_t>(count));
    for (__nv_bfloat16& x : out) x = __float2bfloat16_rn(static_cast<float>(normal(random_)));
    return out;
  }
  std::vector<float> NormalFloat(int64_t count, double scale = 1.0) {
    std::normal_distribution<double> normal(0.0, scale);
    std::vector<float> out(static_cast<size_t>(count));
    for (float& x : out) x = static_cast<float>(normal(random_));
    return out;
  }

  uint32_t seed_ = 0;
  std::mt19937_64 random_;
};

}  // namespace ringleader::kernels
