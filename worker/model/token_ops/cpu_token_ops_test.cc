#include "worker/model/token_ops/cpu_token_ops.h"

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

}  // namespace ringleader::model
