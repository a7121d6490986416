// Fused passes as TokenOps against LibTorch's operators in fp64, on the same values: the tests of
// every device. A device's test instantiates them (INSTANTIATE_TEST_SUITE_P) with a case of its
// own.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <ostream>

#include "worker/model/testing/plain_token_ops.h"
#include "worker/model/token_ops/token_ops.h"

namespace ringleader::model {

struct TokenOpsCase {
  const char* name;
  torch::Device device;
  torch::ScalarType type;
  double tolerance;  // of results in that type, relative
  std::unique_ptr<TokenOps> (*make)();
  void (*prepare)();  // before each test, which it may skip
};
inline void PrintTo(const TokenOpsCase& param, std::ostream* out) {
  *out << param.name;
}

class TokenOpsTest : public testing::TestWithParam<TokenOpsCase> {
 protected:
  void SetUp() override {
    GetParam().prepare();
    if (IsSkipped() || HasFatalFailure()) return;
    torch::manual_seed(1);
    fused_ = GetParam().make();
  }

  torch::Tensor Random(at::IntArrayRef sizes, double scale = 1.0) const {
    return (torch::randn(sizes, GetParam().device) * scale).to(GetParam().type);
  }
  torch::Tensor Zeros(at::IntArrayRef sizes) const {
    return torch::zeros(sizes, torch::dtype(torch::kFloat).device(GetParam().device));
  }
  torch::Tensor RandomIntegers(int64_t bound, int64_t count) const {
    return torch::randint(bound, {count}, torch::dtype(torch::kLong).device(GetParam().device));
  }

  std::unique_ptr<TokenOps> fused_;
  const PlainTokenOps plain_ = {};
};

}  // namespace ringleader::model
