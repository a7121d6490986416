// Softmax cross entropy over a chunk of logits; the gradient replaces the logits, so a chunked
// language-model head needs memory for one chunk only and reads and writes it once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"

namespace ringleader::kernels::fused {

// Rows are held in shared memory by a cluster of blocks, which bounds the vocabulary.
inline constexpr int64_t kMaxVocabulary = 262144;
// A row with this label has no loss and no gradient.
inline constexpr int64_t kIgnoredLabel = -100;

// loss[r] = log(sum exp(logits[r])) - logits[r][labels[r]], in fp32. With `gradient`,
// logits[r] <- (softmax(logits[r]) - onehot(labels[r])) * *gradient_scale; columns from vocabulary
// to stride become 0. A label outside [0, vocabulary) that is not kIgnoredLabel makes the row's
// loss NaN.
struct CrossEntropyArgs {
  __nv_bfloat16* logits = nullptr;  // [rows, stride], 16-byte aligned
  int64_t stride = 0;               // elements, a multiple of 8, at least vocabulary
  const int64_t* labels = nullptr;  // [rows]
  float* loss = nullptr;            // [rows]
  int64_t rows = 0;
  int64_t vocabulary = 0;
  bool gradient = true;
  const float* gradient_scale =
      nullptr;  // one float on the device, e.g. 1 / tokens; needed with `gradient`
};
absl::Status CrossEntropy(const CrossEntropyArgs& args, cudaStream_t stream);

}  // namespace ringleader::kernels::fused
