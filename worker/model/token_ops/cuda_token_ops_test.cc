#include "worker/model/token_ops/cuda_token_ops.h"

#include "worker/model/testing/need_gpu.h"
#include "worker/model/testing/token_ops_test.h"

namespace ringleader::model {

INSTANTIATE_TEST_SUITE_P(Cuda, TokenOpsTest,
                         testing::Values(TokenOpsCase{.name = "bf16 on a GPU",
                                                      .device = torch::kCUDA,
                                                      .type = torch::kBFloat16,
                                                      .tolerance = 6e-3,
                                                      .make = [] { return NewCudaTokenOps(); },
                                                      .prepare = [] { NeedGpu(); }}));

}  // namespace ringleader::model
