// One rank's assignment as plain data: what the protobuf side reads from its worker and the torch
// side trains.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "balance/sample_weights.h"
#include "model_shape/memory_estimate.h"
#include "model_shape/model_config.h"
#include "model_shape/precision.h"
#include "patterns/attention_options.h"
#include "ring/head_shares.h"
#include "worker/data/loader.h"
#include "worker/optim/adamw.h"
#include "worker/optim/schedule.h"

namespace ringleader::trainer {

// How sequences lie on the ranks that share them, and how keys travel.
struct PlanShape {
  ring::RingShape ring;
  kernels::LayoutKind layout = kernels::LayoutKind::kStriped;
  int stripe = 0;  // tokens; striped only; 0: one tile
  // Documents lie as ring/document_layout.h says; `layout` is kStriped, for those that are spread.
  bool by_documents = false;

  bool operator==(const PlanShape&) const = default;
  patterns::AttentionOptions Of(patterns::AttentionOptions options) const {
    options.ring = ring;
    options.layout = layout;
    options.stripe = stripe;
    options.by_documents = by_documents;
    return options;
  }
};

// The part of a StepPlan that ranks act on: of every step, those before its newest change included.
struct Plan : PlanShape {  // from shape_from_step on
  uint64_t version = 0;
  uint64_t effective_step = 0;  // the first step under it; 1 is the first of all
  // The shapes of the steps before shape_from_step, oldest first.
  uint64_t shape_from_step = 0;
  struct EarlierShape {
    uint64_t from_step = 0;
    PlanShape shape;
  };
  std::vector<EarlierShape> earlier_shapes;
  // The weights that deal samples and, by documents, each sequence's documents from
  // weights_from_step on; and those of the steps before it, oldest first.
  balance::SampleWeights sample_weights;
  std::vector<uint32_t> group_permille;  // of the usual speed, by group; empty: all alike
  uint64_t weights_from_step = 0;
  struct EarlierWeights {
    uint64_t from_step = 0;
    balance::SampleWeights weights;
    std::vector<uint32_t> group_permille = {};
  };
  std::vector<EarlierWeights> earlier_weights;

  const PlanShape& ShapeAt(uint64_t step) const {
    const EarlierShape* const earlier = Before(earlier_shapes, shape_from_step, step);
    return earlier == nullptr ? *this : earlier->shape;
  }
  // Returns the weights of `step`; a step before the first that is known has the oldest.
  const balance::SampleWeights& WeightsAt(uint64_t step) const {
    const EarlierWeights* const earlier = Before(earlier_weights, weights_from_step, step);
    return earlier == nullptr ? sample_weights : earlier->weights;
  }
  const std::vector<uint32_t>& GroupPermilleAt(uint64_t step) const {
    const EarlierWeights* const earlier = Before(earlier_weights, weights_from_step, step);
    return earlier == nullptr ? group_permille : earlier->group_permille;
  }
  // Whether both have the step trained alike.
  bool AgreesAt(uint64_t step, const Plan& other) const {
    return ShapeAt(step) == other.ShapeAt(step) && WeightsAt(step) == other.WeightsAt(step) &&
           GroupPermilleAt(step) == other.GroupPermilleAt(step);
  }

 private:
  // What held in the step before the newest change; of a step before the first that is known the
  // oldest; null: the newest does.
  template <typename Earlier>
  static const Earlier* Before(const std::vector<Earlier>& all, uint64_t newest_from,
                               uint64_t step) {
    if (step >= newest_from || all.empty()) return nullptr;
    const Earlier* found = &all.front();
    for (const Earlier& earlier : all) {
      if (step >= earlier.from_step) found = &earlier;
    }
    return found;
  }
};

enum class Engine { kCpu, kCuda };

// What evaluation attends to: what training does, everything, or each in turn.
enum class EvalAttention { kSame, kDense, kBoth };

struct TrainingJob {
  std::string name;   // job id
  std::string uid;    // of this job alone, whatever has its name later
  std::string owner;  // who submitted it; empty: nobody knows
  uint32_t attempt = 0;
  uint64_t fencing_token = 0;  // of the attempt
  int rank = 0;
  int world_size = 1;  // context * data
  int ranks_per_node = 1;
  int context = 1;  // ranks that share one sequence: rank / context is the data-parallel group
  int data = 1;

  // Of the ranks that share a sequence, as many as share out heads are one rank of the ring.
  int ring_ranks() const { return context / attention.head_ranks; }
  int ring_rank() const { return rank % context / attention.head_ranks; }
  ring::HeadPlace head_place() const {
    return {.ranks = attention.head_ranks, .member = rank % attention.head_ranks};
  }

  Engine engine = Engine::kCpu;
  int threads = 1;
  model::MemoryWishes memory;
  int transfer_timeout_seconds = 180;  // GPUs

  std::string model_config;  // config.json; empty when model_init is a folder
  std::string model_init;    // "random" or a Hugging Face folder
  std::string train_data, eval_data;
  data::Batching batching;
  // Samples go to the groups one after another, which meet at every micro-batch: for comparison.
  bool deals_in_order = false;
  uint64_t sequence_length = 0;  // of samples: the most in one micro-batch
  bool document_mask = false;    // packed documents do not attend to each other

  patterns::AttentionOptions attention;  // with the plan's layout, stripe and ring
  Plan plan;                             // at the start
  std::string plan_bytes;                // the same as it travels and lies in checkpoints

  uint64_t steps = 0;
  uint32_t global_batch = 1;  // sequences or samples a step, all groups together
  optim::LearningRateSchedule schedule;
  optim::AdamWOptions adamw;
  uint64_t seed = 0;
  uint64_t eval_every_steps = 0;
  uint32_t eval_sequences = 0;
  EvalAttention eval_attention = EvalAttention::kSame;
  uint32_t max_skipped_steps = 0;
  bool deterministic = false;  // the same bits in every run, on GPUs too
  model::Precision precision = model::Precision::kModelType;
  // Of a precision that casts: the steps whose products read casts; the others read the model's
  // type.
  uint64_t first_cast_step = 1, last_cast_step = std::numeric_limits<uint64_t>::max();

  std::string checkpoint_directory;
  uint64_t checkpoint_every_steps = 0;  // 0: only at the end
  int keep_last = 1;
  bool export_bf16 = false;      // the exported model's weights; else in fp32
  uint64_t checkpoint_step = 0;  // of the newest that earlier attempts saved; 0: none
};

}  // namespace ringleader::trainer
