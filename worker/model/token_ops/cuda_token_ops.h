// TokenOps by the fused kernels: bf16 on Hopper GPUs. Shapes that the kernels do not take surface
// as c10::Error that names the argument.
#pragma once

#include <memory>

#include "worker/model/token_ops/token_ops.h"

namespace ringleader::model {

std::unique_ptr<TokenOps> NewCudaTokenOps();

}  // namespace ringleader::model
