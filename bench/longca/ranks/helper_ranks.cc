#include "bench/longca/ranks/helper_ranks.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "ring/band_tiles.h"

namespace ringleader::bench {
namespace {

using comm::Channel;
using kernels::KeyIntervals;
using kernels::ShardLayout;
using torch::Tensor;

// Who does what at one step; -1: nobody. Ranks attend to their own keys at step 0.
struct Turn {
  int owner = -1;   // whose keys this rank attends to with its own queries
  int helped = -1;  // with whose queries it attends to its own keys
  int helper = -1;  // who attends with its queries
  int reader = -1;  // who attends to its keys

  static Turn Of(int step, int rank, int ranks) {
    Turn turn;
    if (step == 0) return turn;
    if (rank >= step) turn.owner = rank - step;
    if (rank + step < ranks) turn.reader = rank + step;
    // Where ranks are an even number, the last step's pairs lie half of them apart: as many ranks
    // take them as would help.
    const int distance = ranks - step;
    if (distance == step) return turn;
    if (rank < step) turn.helped = distance + rank;
    if (rank >= distance) turn.helper = rank - distance;
    return turn;
  }
};

Tensor FloatsLike(const Tensor& x) {
  return torch::zeros(x.sizes(), x.options().dtype(torch::kFloat));
}

class HelperRank {
 public:
  HelperRank(const HelperInputs& inputs, std::span<const KeyIntervals> rows, HelperDevice* device)
      : inputs_(inputs), rows_(rows), device_(*device) {}

  absl::Status Forward();
  absl::Status Backward();
  HelperOutputs outputs() const { return {out_, dq_, keys_gradient_[0], keys_gradient_[1]}; }
  int64_t tiles() const { return tiles_; }  // of the last forward
  attention::RingBytes TakeBytes() {
    const uint64_t bytes = std::exchange(sent_bytes_, 0);
    return {.sent = bytes, .whole = bytes};
  }

 private:
  // What travels for one step.
  struct Arriving {
    Tensor keys;                  // [2, tokens, kv_heads, d]
    std::vector<Tensor> queries;  // of whom this rank helps
    std::vector<HelperDevice::Await> transfers;
  };

  int rank() const { return device_.rank(); }
  int steps() const { return device_.ranks() / 2 + 1; }
  Turn TurnOf(int step) const { return Turn::Of(step, rank(), device_.ranks()); }
  ShardLayout LayoutOf(int rank) const {
    return {.ranks = device_.ranks(), .rank = rank, .tokens = inputs_.q.size(0) * device_.ranks()};
  }
  int64_t heads() const { return inputs_.q.size(1); }
  // Counts what it sends; awaits it where it returns.
  absl::StatusOr<HelperDevice::Await> Start(Channel channel, const Tensor& sent, int to,
                                            const Tensor& received, int from) {
    if (to >= 0) sent_bytes_ += sent.nbytes();
    return device_.SendReceive(channel, sent, to, received, from);
  }
  // What comes back from a step while the next one computes.
  struct Returning {
    Tensor keys;     // gradients that a reader of this rank's has found
    Tensor queries;  // what a helper has
    std::vector<HelperDevice::Await> transfers;
  };
  absl::Status StartReturn(const Tensor& sent, int to, const Tensor& received, int from,
                           Returning* returning) {
    ASSIGN_OR_RETURN(returning->transfers.emplace_back(),
                     Start(Channel::kGradKv, sent, to, received, from));
    return absl::OkStatus();
  }
  // Starts what `step` needs. `queries`: what a helper needs of this rank's.
  absl::StatusOr<Arriving> Fetch(int step, const std::vector<Tensor>& queries);
  static absl::Status Await(const std::vector<HelperDevice::Await>& transfers) {
    for (const auto& arrived : transfers) RETURN_IF_ERROR(arrived());
    return absl::OkStatus();
  }
  // Nobody helps where ranks are fewer.
  bool has_helpers() const { return device_.ranks() > 2; }
  // q and lse of `query_rank`, keys [2, tokens, kv_heads, d] of `key_rank`.
  HelperDevice::Call CallOf(int query_rank, const Tensor& q, const Tensor& lse, int key_rank,
                            const Tensor& keys) const {
    return {.queries = LayoutOf(query_rank),
            .keys = LayoutOf(key_rank),
            .q = q,
            .k = keys[0],
            .v = keys[1],
            .lse = lse,
            .scale = 1.0f / std::sqrt(static_cast<float>(q.size(2)))};
  }
  absl::Status Attend(const HelperDevice::Call& call, const Tensor& out) {
    tiles_ += heads() * ring::VisibleTiles(call.queries, call.keys, device_.tile(),
                                           rows_.data() + call.queries.rank * call.q.size(0));
    return device_.Forward(call, out);
  }
  // What a helper finds: an output and its logarithms, beside each other.
  struct Found {
    Tensor all, out, lse;
  };
  Found NothingFound() const;
  Found FoundIn(const Tensor& all) const;
  void Merge(const Found& found);
  // All steps: `compute(step, arriving, returning)` while what the next one needs and what the one
  // before gave back travel, and then `take(returning)` of the one before.
  template <typename Compute, typename Take>
  absl::Status Walk(const std::vector<Tensor>& queries, Compute compute, Take take);

  const HelperInputs inputs_;
  const std::span<const KeyIntervals> rows_;  // of the sequence
  HelperDevice& device_;
  Tensor keys_;  // [2, tokens, kv_heads, d]
  Tensor out_, lse_, dq_, keys_gradient_;
  int64_t tiles_ = 0;
  uint64_t sent_bytes_ = 0;
};

absl::StatusOr<HelperRank::Arriving> HelperRank::Fetch(int step,
                                                       const std::vector<Tensor>& queries) {
  const Turn turn = TurnOf(step);
  Arriving arriving;
  if (turn.owner >= 0) arriving.keys = torch::empty_like(keys_);
  ASSIGN_OR_RETURN(arriving.transfers.emplace_back(),
                   Start(Channel::kKvInner, keys_, turn.reader, arriving.keys, turn.owner));
  for (const Tensor& part : queries) {
    arriving.queries.push_back(turn.helped >= 0 ? torch::empty_like(part) : Tensor());
    ASSIGN_OR_RETURN(
        arriving.transfers.emplace_back(),
        Start(Channel::kKvInner, part, turn.helper, arriving.queries.back(), turn.helped));
  }
  return arriving;
}

HelperRank::Found HelperRank::FoundIn(const Tensor& all) const {
  return {.all = all,
          .out = all.narrow(0, 0, inputs_.q.numel()).view(inputs_.q.sizes()),
          .lse = all.narrow(0, inputs_.q.numel(), lse_.numel()).view(lse_.sizes())};
}

HelperRank::Found HelperRank::NothingFound() const {
  Found found = FoundIn(torch::zeros({inputs_.q.numel() + lse_.numel()}, lse_.options()));
  found.lse.fill_(-std::numeric_limits<float>::infinity());
  return found;
}

void HelperRank::Merge(const Found& found) {
  const Tensor sum = torch::logaddexp(lse_, found.lse);
  // [tokens, heads, 1]; nothing of a query that neither has found a key for.
  const auto share = [&](const Tensor& lse) {
    return (lse - sum).exp().nan_to_num_(0.0).t().unsqueeze(-1);
  };
  out_.mul_(share(lse_)).addcmul_(found.out, share(found.lse));
  lse_.copy_(sum);
}

template <typename Compute, typename Take>
absl::Status HelperRank::Walk(const std::vector<Tensor>& queries, Compute compute, Take take) {
  ASSIGN_OR_RETURN(Arriving now, Fetch(0, {}));
  Returning before;
  for (int step = 0; step < steps(); ++step) {
    Arriving next;
    if (step + 1 < steps()) {
      ASSIGN_OR_RETURN(next, Fetch(step + 1, queries));
    }
    RETURN_IF_ERROR(Await(now.transfers));
    Returning returning;
    RETURN_IF_ERROR(compute(step, now, &returning));
    RETURN_IF_ERROR(Await(before.transfers));
    take(before);
    before = std::move(returning);
    now = std::move(next);
  }
  RETURN_IF_ERROR(Await(before.transfers));
  take(before);
  return absl::OkStatus();
}

absl::Status HelperRank::Forward() {
  keys_ = torch::stack({inputs_.k, inputs_.v});
  out_ = FloatsLike(inputs_.q);
  lse_ = torch::full({heads(), inputs_.q.size(0)}, -std::numeric_limits<float>::infinity(),
                     out_.options());
  tiles_ = 0;
  std::vector<Tensor> queries;
  if (has_helpers()) queries = {inputs_.q};
  const auto compute = [&](int step, const Arriving& now, Returning* returning) -> absl::Status {
    const Turn turn = TurnOf(step);
    if (step == 0) {
      RETURN_IF_ERROR(Attend(CallOf(rank(), inputs_.q, lse_, rank(), keys_), out_));
    } else if (turn.owner >= 0) {
      RETURN_IF_ERROR(Attend(CallOf(rank(), inputs_.q, lse_, turn.owner, now.keys), out_));
    }
    if (turn.helper >= 0) returning->queries = NothingFound().all;
    Found found;
    if (turn.helped >= 0) {
      found = NothingFound();
      RETURN_IF_ERROR(
          Attend(CallOf(turn.helped, now.queries[0], found.lse, rank(), keys_), found.out));
    }
    return StartReturn(found.all, turn.helped, returning->queries, turn.helper, returning);
  };
  return Walk(queries, compute, [&](const Returning& returning) {
    if (returning.queries.defined()) Merge(FoundIn(returning.queries));
  });
}

absl::Status HelperRank::Backward() {
  dq_ = FloatsLike(inputs_.q);
  keys_gradient_ = FloatsLike(keys_);
  const Tensor delta = (inputs_.d_out * out_).sum(-1).t().contiguous();
  const auto attend = [&](const HelperDevice::Call& call, const Tensor& d_out, const Tensor& of,
                          const Tensor& dq, const Tensor& keys) {
    return device_.Backward(call, d_out, of, dq, keys[0], keys[1]);
  };
  // What a helper is sent in the type of queries, and in fp32.
  std::vector<Tensor> queries;
  if (has_helpers()) {
    queries = {torch::stack({inputs_.q, inputs_.d_out}), torch::stack({lse_, delta})};
  }
  const auto compute = [&](int step, const Arriving& now, Returning* returning) -> absl::Status {
    const Turn turn = TurnOf(step);
    Tensor theirs, found;  // gradients of another's keys and queries
    if (step == 0) {
      RETURN_IF_ERROR(attend(CallOf(rank(), inputs_.q, lse_, rank(), keys_), inputs_.d_out, delta,
                             dq_, keys_gradient_));
    } else if (turn.owner >= 0) {
      theirs = FloatsLike(keys_);
      RETURN_IF_ERROR(attend(CallOf(rank(), inputs_.q, lse_, turn.owner, now.keys), inputs_.d_out,
                             delta, dq_, theirs));
    }
    if (turn.helped >= 0) {
      found = FloatsLike(inputs_.q);
      const Tensor &of = now.queries[0], &sums = now.queries[1];
      RETURN_IF_ERROR(attend(CallOf(turn.helped, of[0], sums[0], rank(), keys_), of[1], sums[1],
                             found, keys_gradient_));
    }
    if (turn.reader >= 0) returning->keys = torch::empty_like(keys_gradient_);
    if (turn.helper >= 0) returning->queries = torch::empty_like(dq_);
    RETURN_IF_ERROR(StartReturn(theirs, turn.owner, returning->keys, turn.reader, returning));
    return StartReturn(found, turn.helped, returning->queries, turn.helper, returning);
  };
  return Walk(queries, compute, [&](const Returning& returning) {
    if (returning.keys.defined()) keys_gradient_.add_(returning.keys);
    if (returning.queries.defined()) dq_.add_(returning.queries);
  });
}

}  // namespace

bool HelpersCan(const MaskedSequence& sequence, kernels::MaskKind mask, int ranks) {
  const auto rows =
      IntervalsOf(sequence.MaskOf(mask), static_cast<int32_t>(sequence.tokens), sequence.documents);
  if (!rows.ok()) return false;
  const int64_t n = sequence.tokens / ranks;
  for (int64_t i = 0; i < sequence.tokens; ++i) {
    const KeyIntervals& row = (*rows)[i];
    const int64_t seen = (i / n + 1) * n;  // up to its rank's last key
    if (row.end > std::max<int64_t>(row.begin, seen)) return false;
    if (row.second_end > std::max<int64_t>(row.second_begin, seen)) return false;
  }
  return true;
}

absl::StatusOr<HelperOutputs> RunHelperRank(const HelperInputs& inputs,
                                            std::span<const KeyIntervals> rows, int warm_ups,
                                            int repetitions, HelperDevice& device, RankRun* run) {
  HelperRank rank(inputs, rows, &device);
  for (int repetition = -warm_ups; repetition < repetitions; ++repetition) {
    RETURN_IF_ERROR(device.Meet());
    auto start = std::chrono::steady_clock::now();
    RETURN_IF_ERROR(rank.Forward());
    device.Finish();
    if (repetition >= 0) run->forward_ms.push_back(MillisecondsSince(start));
    run->forward_bytes = rank.TakeBytes();
    RETURN_IF_ERROR(device.Meet());
    start = std::chrono::steady_clock::now();
    RETURN_IF_ERROR(rank.Backward());
    device.Finish();
    if (repetition >= 0) run->backward_ms.push_back(MillisecondsSince(start));
    run->backward_bytes = rank.TakeBytes();
  }
  run->tiles = static_cast<double>(rank.tiles());
  return rank.outputs();
}

}  // namespace ringleader::bench
