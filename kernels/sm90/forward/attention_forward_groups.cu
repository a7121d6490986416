// Forward attention to groups of keys, in a compilation of its own beside the other instances.
#include "kernels/sm90/forward/attention_forward_launch.cuh"

namespace ringleader::kernels::sm90 {

template absl::Status LaunchForward<64, WalkKind::kGroups64>(
    const AttentionForwardArgs<__nv_bfloat16>&, const ForwardParams&, cudaStream_t);
template absl::Status LaunchForward<128, WalkKind::kGroups64>(
    const AttentionForwardArgs<__nv_bfloat16>&, const ForwardParams&, cudaStream_t);
template absl::Status LaunchForward<64, WalkKind::kPairGroups128>(
    const AttentionForwardArgs<__nv_bfloat16>&, const ForwardParams&, cudaStream_t);
template absl::Status LaunchForward<128, WalkKind::kPairGroups128>(
    const AttentionForwardArgs<__nv_bfloat16>&, const ForwardParams&, cudaStream_t);

}  // namespace ringleader::kernels::sm90
