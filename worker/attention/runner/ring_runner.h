// Walks a ring schedule, forward and backward, for any device. No LibTorch, no CUDA.
//
// A layer's forward: the layout of the call, the index, the steps of the ring, the pass over the
// selected columns, which were picked up as the keys went by, and the finish. Backward: the
// columns' gradients first, then the steps, in which gradients of keys and values travel with them
// and come home.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "patterns/attention_options.h"
#include "patterns/index/head_budgets.h"
#include "ring/document_layout.h"
#include "ring/travelling_rows.h"
#include "worker/attention/runner/attention_device.h"

namespace ringleader::attention {

// One call at a time, the same calls in the same order on all ranks.
class RingRunner {
 public:
  // INVALID_ARGUMENT, naming the option, where options do not fit each other or the ranks.
  // `device` outlives the result.
  static absl::StatusOr<std::unique_ptr<RingRunner>> Create(
      const patterns::AttentionOptions& options, AttentionDevice* device);

  // The index serves the layer's Backward. FAILED_PRECONDITION between StartBackward and Backward.
  // `next`, if there is one, will be the next call: its keys and values travel during this one.
  absl::StatusOr<std::shared_ptr<const LayerIndex>> Forward(AttentionCall& call,
                                                            AttentionCall* next = nullptr);
  // ContextAttention::StartForward, AttentionRecord::StartBackward. FAILED_PRECONDITION if either
  // has been started already; of a forward between whose start and call the documents, or whether
  // attention is dense, changed.
  absl::Status StartForward(AttentionCall& call);
  absl::Status StartBackward(const LayerIndex& index, AttentionCall& call);
  // `next` likewise: the backward of another call of the same sequence.
  absl::Status Backward(const LayerIndex& index, AttentionCall& call,
                        AttentionCall* next = nullptr);

  // ContextAttention's.
  void SetDense(bool dense) { all_dense_ = dense; }
  absl::Status SetDocuments(int64_t tokens, std::span<const int64_t> firsts, int64_t padding = 0,
                            std::span<const int64_t> prefix_ends = {});
  absl::Status SetVisible(std::span<const kernels::KeyIntervals> queries);
  // The documents of `layout` that are spread, which the next forwards attend to.
  absl::Status SetSpread(const ring::DocumentLayout& layout);
  void SetStep(uint64_t step);
  void SetMove(float factor) { move_ = factor; }
  void SetHeadBudgets(std::span<const patterns::LayerBudgets> layers) {
    head_budgets_.assign(layers.begin(), layers.end());
  }
  void MarkMicroBatch() { device_.MarkMicroBatch(); }
  AttentionStats TakeStats();

 private:
  using Known = std::optional<patterns::KnownKeys>;  // nullopt: more than positions decide
  // Rows of hops that were asked for.
  struct KnownRows {
    std::shared_ptr<const DeviceDocuments> documents;
    patterns::KnownKeys keys = {};
    int64_t local_tokens = 0;
    bool is_backward = false;
    std::shared_ptr<const ring::TravellingRows> rows;
  };

  // Keys and values of a forward that was started, and what decided which of them travel.
  struct StartedForward {
    std::unique_ptr<RingSlots> kv;
    std::shared_ptr<const DeviceDocuments> documents;
    Known known;
  };

  // The queries that a step probes in sequences of `tokens` tokens.
  struct Probed {
    int64_t tokens = 0;
    std::shared_ptr<const DeviceDocuments> queries;
    DeviceArray<int64_t> rows;                     // this rank's, as local queries
    std::shared_ptr<const DeviceDocuments> heard;  // others, that choose; null: none
  };

  // A document by itself, with or without padding, that forwards attended to.
  struct KnownDocument {
    int64_t tokens = 0, padding = 0;
    std::shared_ptr<const DeviceDocuments> documents;
  };

  RingRunner(const patterns::AttentionOptions& options, AttentionDevice* device);

  kernels::ShardLayout LayoutOf(int rank, int64_t local_tokens) const;
  // This rank's, of a call over a sequence with `documents`, which may be null.
  kernels::ShardLayout Mine(const DeviceDocuments* documents, const AttentionCall& call) const;
  void UseDocuments(std::shared_ptr<const SequenceDocuments> documents, int64_t tokens);
  // Keys and values on their way, for either direction, of a layer that attends to what is `known`.
  absl::StatusOr<std::unique_ptr<RingSlots>> Start(
      const ring::RingSchedule& schedule, const std::shared_ptr<const DeviceDocuments>& documents,
      const Known& known, AttentionCall& call);
  // The schedule's slots with this rank's keys and values, which carry what ranks attend to.
  absl::StatusOr<std::unique_ptr<RingSlots>> PlaceKv(
      const ring::RingSchedule& schedule, const std::shared_ptr<const DeviceDocuments>& documents,
      const Known& known, AttentionCall& call);
  // What a layer attends to, as far as positions alone say.
  Known KnownOf(int layer) const;
  // Null: hops carry all rows.
  std::shared_ptr<const ring::TravellingRows> RowsOf(
      const ring::RingSchedule& schedule, const std::shared_ptr<const DeviceDocuments>& documents,
      const Known& known, int64_t local_tokens);
  // Counts the hops of one pass: of keys and values, or of their gradients.
  void CountHops(const ring::RingSchedule& schedule, bool gradients,
                 const ring::TravellingRows* rows, int64_t slot_tokens, const AttentionCall& call);
  bool is_dense(int layer) const;
  absl::StatusOr<std::shared_ptr<LayerIndex>> ChooseTiles(AttentionCall& call);
  // A rank's own keys, at no step.
  Step OwnStep(const LayerIndex& index, const AttentionCall& call) const;
  // Starts what the schedule starts with the step, then awaits the step's keys.
  absl::StatusOr<Step> Arrive(const ring::RingSchedule& schedule, size_t number, const Step& own,
                              RingSlots& kv);
  absl::Status AttendSteps(const Step& own, RingSlots& kv, AttentionCall& call);
  absl::Status Probe(AttentionCall& call);
  absl::Status ProbeQueries(const DeviceDocuments& queries, ProbedRows rows, AttentionCall& call);
  const Probed& ProbedBy(AttentionCall& call);
  // What building a layer's index starts from, but for its work.
  patterns::IndexInputs InputsOf(const AttentionCall& call) const;
  absl::Status BackwardSteps(const Step& own, RingSlots& kv, RingSlots& gradients,
                             AttentionCall& call);

  const patterns::AttentionOptions options_;
  AttentionDevice& device_;
  ring::RingSchedule forward_, backward_;
  bool all_dense_ = false;
  std::shared_ptr<const DeviceDocuments> documents_;  // of the next forwards; null: one
  uint64_t step_ = 0;                                 // of training; 0: none
  float move_ = 1.0f;                                 // of the next forwards
  std::vector<patterns::LayerBudgets> head_budgets_;  // by layer, likewise
  std::optional<Probed> probed_;                      // by this step; nullopt: to be chosen
  std::vector<KnownRows> known_rows_;
  std::vector<KnownDocument> known_documents_;
  RingBytes ring_bytes_;
  std::optional<StartedForward> started_forward_;
  std::unique_ptr<RingSlots> started_;  // keys and values of a backward that was
};

}  // namespace ringleader::attention
