// Backward attention where queries chose blocks: instances in a compilation of their own, for in
// one with the others they changed the machine code of these.
#include "kernels/sm90/backward/attention_backward_launch.cuh"

namespace ringleader::kernels::sm90 {

template absl::Status LaunchBackward<64, WalkKind::kChosen128, QueryGradient::kTogether>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
template absl::Status LaunchBackward<64, WalkKind::kChosen128, QueryGradient::kElsewhere>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
template absl::Status LaunchBackward<64, WalkKind::kChosen64, QueryGradient::kApart>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
template absl::Status LaunchBackward<64, WalkKind::kChosen64, QueryGradient::kElsewhere>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
template absl::Status LaunchBackward<128, WalkKind::kChosen128, QueryGradient::kTogether>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
template absl::Status LaunchBackward<128, WalkKind::kChosen128, QueryGradient::kElsewhere>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
template absl::Status LaunchBackward<128, WalkKind::kChosen64, QueryGradient::kApart>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);
template absl::Status LaunchBackward<128, WalkKind::kChosen64, QueryGradient::kElsewhere>(
    const AttentionBackwardArgs<__nv_bfloat16>&, const BackwardParams&, int, cudaStream_t);

}  // namespace ringleader::kernels::sm90
