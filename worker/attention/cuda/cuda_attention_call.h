// A layer's call on a Hopper GPU: kernels/sm90 and kernels/index over a DeviceCommunicator, bf16
// with fp32 sums. Enqueues on LibTorch's current stream. May throw c10::Error.
#pragma once

#include <torch/types.h>

#include <memory>
#include <optional>
#include <vector>

#include "kernels/index/estimate.h"
#include "kernels/index/select.h"
#include "kernels/ops/gathered_queries.h"
#include "ringleader/kernels/block_choice.h"
#include "ringleader/kernels/earlier_blocks.h"
#include "worker/attention/cuda/cuda_device.h"
#include "worker/attention/runner/attention_device.h"
#include "worker/attention/runner/ring_attention.h"

namespace ringleader::attention {

// Takes tensors that are aligned to 16 bytes. Attention is in cuda_attention_call.cc, the index in
// cuda_index.cc.
class CudaCall : public AttentionCall {
 public:
  // `tensors` outlive it; it sets their results, bf16 but for lse.
  CudaCall(CudaAttentionDevice* device, int layer, CallTensors* tensors)
      : device_(*device), layer_(layer), tensors_(*tensors) {}

  int layer() const override { return layer_; }
  CallShape shape() const override;
  int64_t tokens() const override { return tensors_.k.size(0); }
  int64_t kv_row() const override { return tensors_.k.size(1) * tensors_.k.size(2); }
  absl::StatusOr<std::unique_ptr<RingSlots>> PlaceKv(const ring::RingSchedule& schedule,
                                                     int64_t slot_tokens) override;
  absl::Status Silence(const DeviceArray<int64_t>& rows, float value) override;
  absl::Status LetSpeak() override;
  absl::Status StartOutput() override;
  absl::Status GatherColumns(const Step& step) override;
  absl::Status Attend(const Step& step) override;
  absl::Status AttendColumns(const Step& own) override;
  absl::Status FinishOutput() override;
  absl::Status CountProbe(const patterns::VerticalSlash& work, ProbedRows rows) override;
  absl::StatusOr<std::unique_ptr<RingSlots>> PlaceGradients(const ring::RingSchedule& schedule,
                                                            int64_t slot_tokens) override;
  absl::Status StartGradients() override;
  absl::Status ColumnsBackward(const Step& own) override;
  absl::Status AttendBackward(const Step& step, void* slot) override;
  absl::Status ScatterColumns(const Step& step, void* slot) override;
  absl::Status FinishQueries() override;
  absl::Status ReturnGradients(const ring::RingSchedule& schedule, int64_t slot_tokens,
                               RingSlots& slots) override;

  DeviceMemory Allocate(int64_t bytes) override;
  DeviceMemory Upload(const void* values, int64_t bytes) override;
  int64_t element_bytes() const override { return sizeof(__nv_bfloat16); }
  absl::Status Sum(patterns::SumType type, void* values, int64_t count) override;
  absl::Status Max(float* values, int64_t count) override;
  absl::Status Gather(void* values, int64_t bytes) override;
  absl::Status PrepareEstimate(const patterns::VerticalSlash& work) override;
  absl::Status RowMax(const patterns::VerticalSlash& work) override;
  absl::Status RowSum(const patterns::VerticalSlash& work) override;
  absl::Status Mass(const patterns::VerticalSlash& work) override;
  absl::Status Candidates(const patterns::VerticalSlash& work) override;
  absl::Status Select(const patterns::VerticalSlash& work, const LayerIndex& index) override;
  absl::Status AdaptBudgets(const patterns::VerticalSlash& work) override;
  // Counts on the device; recall is that of all estimate queries.
  absl::Status CountSelection(const patterns::VerticalSlash& work,
                              const LayerIndex& index) override;
  absl::Status NoteChoices(const patterns::VerticalSlash& work, const LayerIndex& index,
                           kernels::HeadChoice* choices) override;
  absl::Status Run(const kernels::BlockStep& step) override;
  absl::Status CountRecall(const int64_t* kept, const int64_t* total, int32_t heads) override;
  absl::Status CountMove(const int64_t* work_before, const int64_t* work_after,
                         const float* factor) override;

 private:
  // Part 0: the keys, part 1: the values that a step attends to.
  kernels::TokenMajor<const __nv_bfloat16> KeysOf(const Step& step, int part) const;
  // Part 0 of a gradient slot: of `keys` keys, part 1: of values.
  kernels::TokenMajor<float> GradientsIn(void* slot, int64_t keys, int part) const;
  // The groups that the step's keys have, from lists that the call makes once.
  absl::StatusOr<kernels::KeyGroups> GroupsOf(const Step& step);
  // The tiles of a step and, of kCsr, the lists that they point into.
  struct HopTiles {
    kernels::TileSelection tiles;
    std::vector<torch::Tensor> lists = {};
  };
  absl::StatusOr<HopTiles> TilesOf(const Step& step) const;
  // Lists the tiles that `chosen` says, of whose blocks a tile of queries keeps `kept_blocks` at
  // most.
  absl::StatusOr<HopTiles> ListTiles(const Step& step, const uint32_t* chosen,
                                     int64_t kept_blocks) const;
  absl::Status AttendTiles(const Step& step, const kernels::TileSelection& tiles);
  absl::Status AttendTilesBackward(const Step& step, const kernels::TileSelection& tiles,
                                   void* slot);
  kernels::AttentionForwardArgs<__nv_bfloat16> ForwardArgs(
      const Step& step, const kernels::TileSelection& tiles) const;
  kernels::AttentionBackwardArgs<__nv_bfloat16> BackwardArgs(const Step& step,
                                                             const kernels::TileSelection& tiles,
                                                             void* slot) const;
  // Queries that chose blocks each for itself (kernels/ops/gathered_queries.h). Nothing where their
  // tiles are visited whole.
  std::optional<kernels::QueryRowsPlan> RowsPlanOf(const LayerIndex& index) const;
  absl::StatusOr<HopTiles> OwnBlocksOf(const Step& step);
  absl::StatusOr<kernels::ops::QueryRows> RowsOf(const Step& step,
                                                 const kernels::QueryRowsPlan& plan) const;
  absl::Status AttendChosen(const Step& step, const kernels::QueryRowsPlan& plan);
  // Tiles of fewer than 64 queries that chose groups (LayerIndex::group_tiles).
  absl::Status AttendSpread(const Step& step);
  absl::Status AttendSpreadBackward(const Step& step, void* slot);
  void TakeSpread(const kernels::SpreadRows& tiles);
  absl::Status CountTiles(const Step& step, const kernels::TileSelection& tiles);
  kernels::index::EstimateArgs EstimateArgsOf(const patterns::VerticalSlash& work) const;

  CudaAttentionDevice& device_;
  const int layer_;
  CallTensors& tensors_;
  // The index.
  torch::Tensor run_sums_;               // [heads, E, runs], from RowMax to Mass
  kernels::index::SelectArgs selected_;  // after Select
  std::vector<torch::Tensor> selected_memory_;
  torch::Tensor silent_rows_, silent_queries_;  // their places and what stood there
  // The index's groups of keys, of all owners.
  torch::Tensor groups_, group_bounds_;
  kernels::GroupLists group_lists_;
  torch::Tensor own_blocks_;  // a choice of each query's own block alone
  // By row of spread tiles: the call's tensors and what comes of the groups.
  struct Rows {
    kernels::SpreadRows tiles = {};
    torch::Tensor q = {}, d_out = {};  // [rows, heads, d]
    torch::Tensor lse = {};            // [heads, rows]
    torch::Tensor delta = {};          // [heads, rows]
    torch::Tensor sums = {};           // [rows, heads, d], fp32: of the output, or of q's gradient
  };
  std::optional<Rows> rows_;
  // Forward: [n, heads, d] fp32, read only where lse says it was written.
  torch::Tensor sums_;
  // Backward, fp32.
  torch::Tensor dq_sums_;    // [n, heads, d]
  torch::Tensor delta_;      // [heads, n]
  torch::Tensor d_columns_;  // [2, heads, max_columns, d]: of keys, of values
};

}  // namespace ringleader::attention
