// What tests that need a GPU share.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "kernels/ops/cuda_call.h"

namespace ringleader::model {

// The test is SKIPPED on a machine without a GPU.
inline void NeedGpu() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    GTEST_SKIP() << "no GPU on this machine";
  }
  const absl::Status loaded = kernels::ops::LoadTorchCuda();
  ASSERT_TRUE(loaded.ok()) << loaded;
}

class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    NeedGpu();
    if (!IsSkipped() && !HasFatalFailure()) torch::manual_seed(1);
  }
};

}  // namespace ringleader::model
