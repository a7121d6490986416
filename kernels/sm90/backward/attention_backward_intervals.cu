// Backward attention to intervals of keys, in a compilation of its own beside the other instances.
#include "kernels/sm90/backward/attention_backward_launch.cuh"

namespace ringleader::kernels::sm90 {

template absl::Status LaunchBackward<64, WalkKind::kIntervals128, QueryGradient::kTogether>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
template absl::Status LaunchBackward<64, WalkKind::kIntervals128, QueryGradient::kElsewhere>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
template absl::Status LaunchBackward<64, WalkKind::kIntervals64, QueryGradient::kApart>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
template absl::Status LaunchBackward<64, WalkKind::kIntervals64, QueryGradient::kElsewhere>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
template absl::Status LaunchBackward<128, WalkKind::kIntervals128, QueryGradient::kTogether>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
template absl::Status LaunchBackward<128, WalkKind::kIntervals128, QueryGradient::kElsewhere>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
template absl::Status LaunchBackward<128, WalkKind::kIntervals64, QueryGradient::kApart>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
template absl::Status LaunchBackward<128, WalkKind::kIntervals64, QueryGradient::kElsewhere>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);

}  // namespace ringleader::kernels::sm90
