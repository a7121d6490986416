// Block-sparse causal attention on Hopper (sm_90a): bf16 in, fp32 accumulated. The same
// arguments and the same results as kernels/reference.
//
// Every call enqueues work on `stream` and returns: it allocates nothing, never waits for the
// device, and can be captured into a graph. Pointers are device pointers of the current device.
// Head dimension 64 or 128, heads a multiple of kv_heads, tile 64 or 128. What is not supported
// comes back as InvalidArgument naming the argument; the outputs are then untouched.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::sm90 {

// Scratch memory of one call, aligned to 256 bytes. Calls on one stream may share it.
struct Workspace {
  void* data = nullptr;
  int64_t bytes = 0;
};

// Bytes a call needs; depends on shapes, on `tiles` and on which outputs there are.
int64_t ForwardWorkspaceBytes(const AttentionForwardArgs<__nv_bfloat16>& args);
int64_t BackwardWorkspaceBytes(const AttentionBackwardArgs<__nv_bfloat16>& args);

// Merges attention to the visited tiles into args.out and args.lse, or writes all of it to
// args.rounded_out.
absl::Status AttentionForward(const AttentionForwardArgs<__nv_bfloat16>& args, Workspace workspace,
                              cudaStream_t stream);

// Adds gradients of the visited tiles into args.dq and into args.dk and args.dv (fp32) or
// args.rounded_dk and args.rounded_dv (bf16). Unless args.deterministic, the order in which fp32
// terms are added differs from run to run.
absl::Status AttentionBackward(const AttentionBackwardArgs<__nv_bfloat16>& args,
                               Workspace workspace, cudaStream_t stream);

}  // namespace ringleader::kernels::sm90
