// The CPU engine (kernels/reference) as a device of the ring: one rank, float32, host memory. No
// LibTorch. Transfers run beside the computation; awaiting one blocks.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/reference/gates/key_group_gate.h"
#include "kernels/reference/index/index_estimate.h"
#include "kernels/reference/math/engine.h"
#include "worker/attention/runner/attention_device.h"
#include "worker/comm/communicator.h"

namespace ringleader::attention {

class CpuAttentionDevice : public AttentionDevice {
 public:
  // `communicator` spans the ranks that share one sequence and outlives it.
  CpuAttentionDevice(comm::Communicator* communicator, int threads)
      : communicator_(*communicator), engine_(threads) {}

  int rank() const override { return communicator_.rank(); }
  int ranks() const override { return communicator_.size(); }
  double most_carried() const override { return 1.0; }
  absl::Status Begin(double AttentionSeconds::*phase) override;
  absl::Status End() override;
  LayerStats& StatsOf(int layer) override;
  void MarkMicroBatch() override;
  AttentionStats TakeStats(const ring::RingSchedule& forward) override;
  std::shared_ptr<const DeviceDocuments> Upload(std::shared_ptr<const SequenceDocuments> documents,
                                                const patterns::EstimateQueries& queries) override;

  comm::Communicator& communicator() { return communicator_; }
  kernels::reference::Engine& engine() { return engine_; }
  double* exposed_seconds() { return &stats_.seconds.exposed_communication; }

 private:
  comm::Communicator& communicator_;
  kernels::reference::Engine engine_;
  AttentionStats stats_;
  VisitedTiles marked_;  // up to the last mark
  double AttentionSeconds::*phase_ = nullptr;
  std::chrono::steady_clock::time_point phase_start_;
  double exposed_before_ = 0.0;
};

// One layer's call. Attention is in cpu_attention_call.cc, the index in cpu_index.cc.
class CpuCall : public AttentionCall {
 public:
  struct Tensors {
    kernels::TokenMajor<const float> q = {}, k = {}, v = {};  // [n, heads, d]; [n, kv_heads, d]
    kernels::TokenMajor<float> out = {};                      // [n, heads, d], zero before forward
    float* lse = nullptr;  // [heads, n], -infinity before forward
    // Backward's; the gradients are dense, dq is zero.
    kernels::TokenMajor<const float> d_out = {};
    kernels::TokenMajor<float> dq = {}, dk = {}, dv = {};
    int first_head = 0;  // of those of the layer
  };
  CpuCall(CpuAttentionDevice* device, int layer, const Tensors& tensors)
      : device_(*device), layer_(layer), tensors_(tensors) {}

  int layer() const override { return layer_; }
  CallShape shape() const override;
  int64_t tokens() const override { return tensors_.k.tokens; }
  int64_t kv_row() const override { return int64_t{tensors_.k.heads} * tensors_.k.head_dim; }
  absl::StatusOr<std::unique_ptr<RingSlots>> PlaceKv(const ring::RingSchedule& schedule,
                                                     int64_t slot_tokens) override;
  absl::Status Silence(const DeviceArray<int64_t>& rows, float value) override;
  absl::Status LetSpeak() override;
  absl::Status StartOutput() override { return absl::OkStatus(); }
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
  int64_t element_bytes() const override { return sizeof(float); }
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
  // Recall is that of every eighth estimate query.
  absl::Status CountSelection(const patterns::VerticalSlash& work,
                              const LayerIndex& index) override;
  absl::Status NoteChoices(const patterns::VerticalSlash& work, const LayerIndex& index,
                           kernels::HeadChoice* choices) override;
  absl::Status Run(const kernels::BlockStep& step) override;
  absl::Status CountRecall(const int64_t* kept, const int64_t* total, int32_t heads) override;
  absl::Status CountMove(const int64_t* work_before, const int64_t* work_after,
                         const float* factor) override;

 private:
  // What Select did for a head.
  struct HeadChoice {
    int32_t slashes = 0;
    double recall = 0.0;  // what columns and diagonals both hold counts twice
    bool verticals_at_budget = false, slashes_at_budget = false;
    int64_t column_mass = 0, diagonal_mass = 0, total = 0;
  };
  // Part 0: the keys, part 1: the values that a step attends to.
  kernels::TokenMajor<const float> KeysOf(const Step& step, int part) const;
  kernels::TokenMajor<float> GradientsIn(void* slot, int64_t keys, int part) const;
  kernels::AttentionForwardArgs<float> ForwardArgs(const Step& step,
                                                   const kernels::TileSelection& tiles) const;
  kernels::AttentionBackwardArgs<float> BackwardArgs(const Step& step,
                                                     const kernels::TileSelection& tiles,
                                                     void* slot) const;
  // q, with the silence of those that are silent.
  kernels::TokenMajor<const float> ChoosingQueries() const;
  // The groups that the step's keys have, from lists that the call makes once.
  kernels::KeyGroups GroupsOf(const Step& step);
  // Tiles of fewer than 64 queries that chose groups (LayerIndex::group_tiles).
  absl::Status AttendSpread(const Step& step);
  absl::Status AttendSpreadBackward(const Step& step, void* slot);

  CpuAttentionDevice& device_;
  const int layer_;
  const Tensors tensors_;
  std::vector<float> choosing_;  // [n, heads, d]: q while some are silent; empty: none is
  std::optional<kernels::reference::IndexEstimate> estimate_;  // from RowMax on
  std::vector<HeadChoice> choices_;                            // [heads], from Select on
  kernels::reference::ListedGroups groups_;                    // the index's, of all owners
  std::vector<float> delta_;                                   // [heads, n]
  // By row of spread tiles: the call's tensors and what comes of the groups.
  struct Rows {
    kernels::SpreadRows tiles = {};
    std::vector<float> q = {}, d_out = {};    // [rows, heads, d]
    std::vector<float> lse = {}, delta = {};  // [heads, rows]
    std::vector<float> sums = {};             // [rows, heads, d]: of the output, or of q's gradient
  };
  std::optional<Rows> rows_;
  std::vector<float> d_column_keys_, d_column_values_;  // [heads, max_columns, d]
};

}  // namespace ringleader::attention
