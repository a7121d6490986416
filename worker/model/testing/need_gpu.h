// What tests that need a GPU share.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "kernels/ops/cuda_call.h"

namespace ringleader::model {

// SKIPPED on a machine without a GPU.
class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "no GPU on this machine";
    }
    const absl::Status loaded = kernels::ops::LoadTorchCuda();
    ASSERT_TRUE(loaded.ok()) << loaded;
    torch::manual_seed(1);
  }
};

}  // namespace ringleader::model
