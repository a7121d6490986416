// What patterns ask of a device when they build an index. A pattern (a file of patterns/kinds/)
// owns the numbers, the order of the steps and what ranks exchange; a device owns the arithmetic.
// Everything that ranks merge is an integer sum, a maximum or a concatenation in rank order, so
// that an index is the same on any number of ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "patterns/index/device_array.h"
#include "patterns/index/layer_index.h"
#include "ringleader/kernels/balance_steps.h"
#include "ringleader/kernels/block_choice.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::patterns {

struct VerticalSlash;

// One rank's view of a layer's call.
struct IndexInputs {
  kernels::ShardLayout layout;  // of this rank
  int32_t heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 0.0f;                                          // of logits
  std::shared_ptr<const DeviceDocuments> documents = nullptr;  // null: one
  // attention.balance: `is_balanced` says whether this call's choice is moved at all, and `move` is
  // the factor of its work that brings its group to the groups' anchor. All ranks of a ring agree.
  bool is_balanced = false;
  float move = 1.0f;
  // LayerBudgets::halves of the layer; empty: all heads have the same budget.
  std::span<const int32_t> head_halves = {};
};

// Tokens of the sequence before the padding at its end, which has no say in what is chosen.
inline int64_t ContentOf(const IndexInputs& inputs) {
  return inputs.documents == nullptr ? inputs.layout.tokens : inputs.documents->host->content;
}

// This rank's tokens before that: its first ones.
inline int64_t ContentRows(const IndexInputs& inputs) {
  int64_t begin = 0, end = inputs.layout.local_tokens();
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    const bool is_content = inputs.layout.Position(middle) < ContentOf(inputs);
    (is_content ? begin : end) = is_content ? middle + 1 : middle;
  }
  return begin;
}

// The types that ranks sum.
enum class SumType { kQueries, kInt32, kInt64 };  // kQueries: the type of q

// Serves one layer's call, whose q and k it knows. On GPUs a verb enqueues its work and returns,
// and allocation may throw LibTorch's c10::Error.
class IndexDevice {
 public:
  virtual ~IndexDevice() = default;

  // The host may read and write it on the CPU engine, where it starts as zeros.
  virtual DeviceMemory Allocate(int64_t bytes) = 0;
  // Copies `bytes` of the host's memory, which may change afterwards.
  virtual DeviceMemory Upload(const void* values, int64_t bytes) = 0;
  virtual int64_t element_bytes() const = 0;  // of q and k

  // These exchange values between the ranks, on the control channel and in rank order. A rank that
  // is alone does not call them.
  virtual absl::Status Sum(SumType type, void* values, int64_t count) = 0;
  virtual absl::Status Max(float* values, int64_t count) = 0;
  // values: [ranks, bytes]; this rank's part is set.
  virtual absl::Status Gather(void* values, int64_t bytes) = 0;

  // The steps of vertical-slash, in this order; vertical_slash.h says what each reads and writes.
  virtual absl::Status PrepareEstimate(const VerticalSlash& work) = 0;
  virtual absl::Status RowMax(const VerticalSlash& work) = 0;
  virtual absl::Status RowSum(const VerticalSlash& work) = 0;
  virtual absl::Status Mass(const VerticalSlash& work) = 0;
  virtual absl::Status Candidates(const VerticalSlash& work) = 0;
  virtual absl::Status Select(const VerticalSlash& work, const LayerIndex& index) = 0;
  // Changes the budgets by what a Select kept, for another Select.
  virtual absl::Status AdaptBudgets(const VerticalSlash& work) = 0;
  // Writes what a Select chose to `choices`: [heads].
  virtual absl::Status NoteChoices(const VerticalSlash& work, const LayerIndex& index,
                                   kernels::HeadChoice* choices) = 0;
  // Adds verticals, slashes and recall to the layer's statistics.
  virtual absl::Status CountSelection(const VerticalSlash& work, const LayerIndex& index) = 0;

  // Adds the recall of a choice that holds kept[head] of total[head], of all ranks, to the layer's
  // statistics: its mean over `heads`.
  virtual absl::Status CountRecall(const int64_t* kept, const int64_t* total, int32_t heads) = 0;

  // Runs a step of the patterns that choose blocks, or of a move's arithmetic.
  virtual absl::Status Run(const kernels::BlockStep& step) = 0;
  // Adds a choice that was to be moved by *factor to the layer's statistics, unless that is 1.
  virtual absl::Status CountMove(const int64_t* work_before, const int64_t* work_after,
                                 const float* factor) = 0;
};

template <typename T>
DeviceArray<T> AllocateArray(IndexDevice& device, int64_t size) {
  return {.memory = device.Allocate(size * static_cast<int64_t>(sizeof(T))), .size = size};
}

template <typename T>
DeviceArray<T> UploadArray(IndexDevice& device, const std::vector<T>& values) {
  const auto size = static_cast<int64_t>(values.size());
  return {.memory = device.Upload(values.data(), size * static_cast<int64_t>(sizeof(T))),
          .size = size};
}

}  // namespace ringleader::patterns
