#include "worker/model/token_ops/cpu_token_ops.h"

#include <fstream>
#include <string>

#include "worker/model/testing/token_ops_test.h"

namespace ringleader::model {

INSTANTIATE_TEST_SUITE_P(Cpu, TokenOpsTest,
                         testing::Values(TokenOpsCase{
                             .name = "fp32 on the CPU",
                             .device = torch::kCPU,
                             .type = torch::kFloat,
                             .tolerance = 1e-5,
                             .make = [] { return NewCpuTokenOps(/*threads=*/3); },
                             .prepare = [] {}}));

// The most memory that this process has had since the last ResetPeak().
int64_t PeakBytes() {
  std::ifstream status("/proc/self/status");
  int64_t kilobytes = 0;
  for (std::string word; status >> word;) {
    if (word == "VmHWM:") status >> kilobytes;
  }
  return kilobytes * 1024;
}
void ResetPeak() {
  std::ofstream("/proc/self/clear_refs") << 5;
}

// What memory is planned with (model_shape/memory_estimate.h).
TEST(CpuTokenOpsTest, LossesTakeNoSecondTensorOfLogits) {
  constexpr int64_t kRows = 1024, kVocab = 65536, kBytes = kRows * kVocab * 4;
  const auto ops = NewCpuTokenOps(/*threads=*/2);
  const torch::Tensor logits = torch::ones({kRows, kVocab}),
                      labels = torch::zeros({kRows}, torch::kLong);
  for (const bool gradient : {false, true}) {
    ResetPeak();
    const int64_t before = PeakBytes();
    ops->CrossEntropy(logits, labels, gradient);
    EXPECT_LT(PeakBytes() - before, kBytes / 4) << gradient;
  }
}

}  // namespace ringleader::model
