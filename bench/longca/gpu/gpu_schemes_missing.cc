// In builds without nvcc.
#include "bench/longca/gpu/gpu_schemes.h"

namespace ringleader::bench {

absl::StatusOr<int> RunGpuSchemes(const BenchOptions&) {
  return absl::FailedPreconditionError(
      "this ringleader-bench was built without kernels for GPUs; build it where nvcc is, or "
      "leave --engine cuda out");
}

int GpuCount() {
  return 0;
}

}  // namespace ringleader::bench
