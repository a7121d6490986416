#include <algorithm>
#include <array>
#include <atomic>

#include "base/status_macros.h"
#include "kernels/fused/cross_entropy.h"
#include "kernels/fused/cross_entropy_kernel.cuh"
#include "kernels/fused/cuda_status.h"

namespace ringleader::kernels::fused {
namespace {

// A launch with as many clusters as fit on the device at once, or as there are rows.
class ClusterLaunch {
 public:
  ClusterLaunch(int cluster, int threads, size_t shared_bytes, cudaStream_t stream)
      : cluster_(cluster) {
    attribute_.id = cudaLaunchAttributeClusterDimension;
    attribute_.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    config_.gridDim = dim3(static_cast<unsigned>(cluster));
    config_.blockDim = dim3(static_cast<unsigned>(threads));
    config_.dynamicSmemBytes = shared_bytes;
    config_.stream = stream;
    config_.attrs = &attribute_;
    config_.numAttrs = 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;

  void SetClusters(int64_t clusters) {
    config_.gridDim.x = static_cast<unsigned>(clusters * cluster_);
  }
  const cudaLaunchConfig_t& config() const { return config_; }

 private:
  int cluster_;
  cudaLaunchAttribute attribute_ = {};
  cudaLaunchConfig_t config_ = {};
};

template <typename Plan, bool kGradient>
absl::Status Launch(const CrossEntropyArgs& args, cudaStream_t stream) {
  constexpr size_t kSharedBytes = sizeof(EntropyShared<Plan>);
  const auto kernel = CrossEntropyKernel<Plan, kGradient>;
  RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(kSharedBytes)),
                       "CrossEntropy: shared memory");
  ClusterLaunch launch(Plan::kCluster, Plan::kThreads + 32, kSharedBytes, stream);
  // Each device is asked once how many fit.
  static std::array<std::atomic<int>, 64> fitting;
  int device = 0;
  RETURN_IF_CUDA_ERROR(cudaGetDevice(&device), "CrossEntropy");
  std::atomic<int>* known = device < static_cast<int>(fitting.size()) ? &fitting[device] : nullptr;
  int clusters = known == nullptr ? 0 : known->load(std::memory_order_relaxed);
  if (clusters == 0) {
    RETURN_IF_CUDA_ERROR(cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config()),
                         "CrossEntropy: clusters");
    if (clusters == 0) {
      return absl::FailedPreconditionError(
          "CrossEntropy: the device cannot hold one cluster; run it where no other program limits "
          "multiprocessors");
    }
    if (known != nullptr) known->store(clusters, std::memory_order_relaxed);
  }
  launch.SetClusters(std::min<int64_t>(clusters, args.rows));
  RETURN_IF_CUDA_ERROR(cudaLaunchKernelEx(&launch.config(), kernel, args), "CrossEntropy");
  return absl::OkStatus();
}

template <typename Plan>
absl::Status Launch(const CrossEntropyArgs& args, cudaStream_t stream) {
  return args.gradient ? Launch<Plan, true>(args, stream) : Launch<Plan, false>(args, stream);
}

}  // namespace

absl::Status CrossEntropy(const CrossEntropyArgs& args, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckSize(args.vocabulary, "CrossEntropy: vocabulary", 1, kMaxVocabulary));
  RETURN_IF_ERROR(
      CheckSize(args.stride, "CrossEntropy: stride", args.vocabulary, kMaxVocabulary, kVec));
  RETURN_IF_ERROR(CheckSize(args.rows, "CrossEntropy: rows", 0, INT32_MAX / 8));
  if (args.rows == 0) return absl::OkStatus();
  RETURN_IF_ERROR(CheckPointer(args.logits, "CrossEntropy: logits"));
  if (args.labels == nullptr) return absl::InvalidArgumentError("CrossEntropy: labels is null");
  if (args.loss == nullptr) return absl::InvalidArgumentError("CrossEntropy: loss is null");
  if (args.gradient && args.gradient_scale == nullptr) {
    return absl::InvalidArgumentError(
        "CrossEntropy: gradient_scale is null; set it, or gradient = false");
  }
  // Short rows: three small blocks a multiprocessor, one computes while another awaits its sums.
  // Long ones: a block a multiprocessor, for the longest ring.
  using Short = EntropyPlan<1, 128, 4, 9, 3>;
  using Middle = EntropyPlan<2, 128, 4, 9, 3>;
  using Long = EntropyPlan<2, 384, 4, 9, 1>;
  using Longest = EntropyPlan<4, 384, 4, 9, 1>;
  const int64_t vectors = args.stride / kVec;
  if (vectors <= 8 * Short::kChunk) return Launch<Short>(args, stream);
  if (vectors <= 2 * 8 * Middle::kChunk) return Launch<Middle>(args, stream);
  if (vectors <= 2 * 8 * Long::kChunk) return Launch<Long>(args, stream);
  static_assert(4 * 8 * Longest::kChunk >= kMaxVocabulary / kVec);
  return Launch<Longest>(args, stream);
}

}  // namespace ringleader::kernels::fused
