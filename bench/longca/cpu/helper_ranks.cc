#include "bench/longca/cpu/helper_ranks.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "kernels/reference/attention/attention.h"

namespace ringleader::bench {
namespace {

using comm::Channel;
using comm::Communicator;
using comm::Transfer;
using kernels::KeyIntervals;
using kernels::MaskKind;
using kernels::ShardLayout;
using kernels::TilePattern;
using kernels::TileSelection;
using kernels::reference::Engine;
using kernels::reference::testing::Shard;
using kernels::reference::testing::Tensor;

const float kScale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));

ShardLayout LayoutOf(int64_t tokens, int ranks, int rank) {
  return {.ranks = ranks, .rank = rank, .tokens = tokens};
}

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
int StepsOf(int ranks) {
  return ranks / 2 + 1;
}

class HelperRank {
 public:
  HelperRank(const Problem& problem, std::vector<KeyIntervals> rows, Communicator* communicator)
      : communicator_(*communicator),
        tokens_(problem.tokens),
        rows_(std::move(rows)),
        q_(Shard(problem.q, Mine())),
        k_(Shard(problem.k, Mine())),
        v_(Shard(problem.v, Mine())),
        d_out_(Shard(problem.d_out, Mine())),
        out_(q_),
        dq_(q_),
        dk_(k_),
        dv_(k_),
        lse_(kHeads * n()),
        delta_(lse_.size()) {}

  absl::Status Forward();
  absl::Status Backward();
  int64_t tiles() const { return tiles_; }  // of the last forward
  // Writes the rank's rows.
  void PutInto(Results* results) const;

 private:
  // What travels for one step.
  struct Arriving {
    std::vector<float> sent_keys, keys, sent_queries, queries;
    std::vector<std::unique_ptr<Transfer>> transfers;
  };

  int rank() const { return communicator_.rank(); }
  int ranks() const { return communicator_.size(); }
  int64_t n() const { return tokens_ / ranks(); }
  int64_t query_floats() const { return n() * kHeads * kHeadDim; }
  int64_t key_floats() const { return n() * kKvHeads * kHeadDim; }
  ShardLayout Mine() const { return LayoutOf(tokens_, communicator_.size(), communicator_.rank()); }
  TileSelection TilesOf(int query_rank) const {
    return {
        .pattern = TilePattern::kFull, .tile = kTile, .intervals = rows_.data() + query_rank * n()};
  }
  static kernels::TokenMajor<const float> View(const float* data, int64_t tokens, int heads) {
    return {data, tokens, heads, kHeadDim, int64_t{heads} * kHeadDim, kHeadDim};
  }
  static kernels::TokenMajor<float> View(float* data, int64_t tokens, int heads) {
    return {data, tokens, heads, kHeadDim, int64_t{heads} * kHeadDim, kHeadDim};
  }
  std::unique_ptr<Transfer> Send(Channel channel, const std::vector<float>& sent, int to,
                                 std::vector<float>* received, int from) {
    return communicator_.SendReceive(channel, sent.data(), sent.size() * sizeof(float), to,
                                     received->data(), received->size() * sizeof(float), from);
  }
  // Starts what `step` needs. `queries`: what a helper needs of this rank's queries, or as much.
  std::unique_ptr<Arriving> Fetch(int step, std::vector<float> queries);
  absl::Status Await(const Arriving& arriving) {
    for (const auto& transfer : arriving.transfers) RETURN_IF_ERROR(transfer->Wait());
    return absl::OkStatus();
  }
  absl::Status Attend(const float* q, int query_rank, const float* k, const float* v, int key_rank,
                      float* out, float* lse);
  // Merges what a helper has found for this rank's queries.
  void Merge(const std::vector<float>& found);
  absl::Status AttendBackward(const float* q, const float* d_out, const float* lse,
                              const float* delta, int query_rank, const float* k, const float* v,
                              int key_rank, float* dq, float* dk, float* dv);
  std::vector<float> BackwardQueries() const;

  Communicator& communicator_;
  Engine engine_{1};
  const int64_t tokens_;                  // of the sequence
  const std::vector<KeyIntervals> rows_;  // likewise
  const Tensor q_, k_, v_, d_out_;
  Tensor out_, dq_, dk_, dv_;
  std::vector<float> lse_, delta_;  // [heads, n]
  int64_t tiles_ = 0;
};

void Append(const std::vector<float>& more, std::vector<float>* all) {
  all->insert(all->end(), more.begin(), more.end());
}

void Add(const float* more, int64_t count, float* sum) {
  for (int64_t i = 0; i < count; ++i) sum[i] += more[i];
}

std::unique_ptr<HelperRank::Arriving> HelperRank::Fetch(int step, std::vector<float> queries) {
  const Turn turn = Turn::Of(step, rank(), ranks());
  auto arriving = std::make_unique<Arriving>();
  if (turn.reader >= 0) {
    arriving->sent_keys = k_.data;
    Append(v_.data, &arriving->sent_keys);
  }
  if (turn.owner >= 0) arriving->keys.resize(2 * key_floats());
  if (turn.helped >= 0) arriving->queries.resize(queries.size());
  if (turn.helper >= 0) arriving->sent_queries = std::move(queries);
  arriving->transfers.push_back(
      Send(Channel::kKvInner, arriving->sent_keys, turn.reader, &arriving->keys, turn.owner));
  arriving->transfers.push_back(Send(Channel::kKvInner, arriving->sent_queries, turn.helper,
                                     &arriving->queries, turn.helped));
  return arriving;
}

absl::Status HelperRank::Attend(const float* q, int query_rank, const float* k, const float* v,
                                int key_rank, float* out, float* lse) {
  int64_t tiles = 0;
  RETURN_IF_ERROR(
      kernels::reference::AttentionForward(engine_,
                                           {.q = View(q, n(), kHeads),
                                            .k = View(k, n(), kKvHeads),
                                            .v = View(v, n(), kKvHeads),
                                            .out = View(out, n(), kHeads),
                                            .lse = lse,
                                            .query_layout = LayoutOf(tokens_, ranks(), query_rank),
                                            .key_layout = LayoutOf(tokens_, ranks(), key_rank),
                                            .tiles = TilesOf(query_rank),
                                            .scale = kScale},
                                           &tiles));
  tiles_ += tiles;
  return absl::OkStatus();
}

void HelperRank::Merge(const std::vector<float>& found) {
  const float* const lse = found.data() + query_floats();
  for (int head = 0; head < kHeads; ++head) {
    for (int64_t i = 0; i < n(); ++i) {
      float& mine = lse_[head * n() + i];
      const float theirs = lse[head * n() + i], most = std::max(mine, theirs);
      if (std::isinf(most)) continue;  // neither has seen a key
      const float sum = most + std::log(std::exp(mine - most) + std::exp(theirs - most));
      const float kept = std::exp(mine - sum), added = std::exp(theirs - sum);
      for (int d = 0; d < kHeadDim; ++d) {
        const int64_t at = (i * kHeads + head) * kHeadDim + d;
        out_.data[at] = kept * out_.data[at] + added * found[at];
      }
      mine = sum;
    }
  }
}

absl::Status HelperRank::Forward() {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  std::ranges::fill(out_.data, 0.0f);
  std::ranges::fill(lse_, kNothing);
  tiles_ = 0;
  std::unique_ptr<Arriving> now = Fetch(0, {});
  for (int step = 0; step < StepsOf(ranks()); ++step) {
    std::unique_ptr<Arriving> next;
    if (step + 1 < StepsOf(ranks())) next = Fetch(step + 1, q_.data);
    RETURN_IF_ERROR(Await(*now));
    const Turn turn = Turn::Of(step, rank(), ranks());
    if (step == 0) {
      RETURN_IF_ERROR(Attend(q_.data.data(), rank(), k_.data.data(), v_.data.data(), rank(),
                             out_.data.data(), lse_.data()));
    } else if (turn.owner >= 0) {
      RETURN_IF_ERROR(Attend(q_.data.data(), rank(), now->keys.data(),
                             now->keys.data() + key_floats(), turn.owner, out_.data.data(),
                             lse_.data()));
    }
    std::vector<float> found, brought;
    if (turn.helped >= 0) {
      found.assign(query_floats() + kHeads * n(), 0.0f);
      float* const lse = found.data() + query_floats();
      std::fill_n(lse, kHeads * n(), kNothing);
      RETURN_IF_ERROR(Attend(now->queries.data(), turn.helped, k_.data.data(), v_.data.data(),
                             rank(), found.data(), lse));
    }
    if (turn.helper >= 0) brought.resize(query_floats() + kHeads * n());
    RETURN_IF_ERROR(Send(Channel::kGradKv, found, turn.helped, &brought, turn.helper)->Wait());
    if (turn.helper >= 0) Merge(brought);
    now = std::move(next);
  }
  return absl::OkStatus();
}

absl::Status HelperRank::AttendBackward(const float* q, const float* d_out, const float* lse,
                                        const float* delta, int query_rank, const float* k,
                                        const float* v, int key_rank, float* dq, float* dk,
                                        float* dv) {
  return kernels::reference::AttentionBackward(
      engine_, {.q = View(q, n(), kHeads),
                .k = View(k, n(), kKvHeads),
                .v = View(v, n(), kKvHeads),
                .d_out = View(d_out, n(), kHeads),
                .lse = lse,
                .delta = delta,
                .dq = View(dq, n(), kHeads),
                .dk = View(dk, n(), kKvHeads),
                .dv = View(dv, n(), kKvHeads),
                .query_layout = LayoutOf(tokens_, ranks(), query_rank),
                .key_layout = LayoutOf(tokens_, ranks(), key_rank),
                .tiles = TilesOf(query_rank),
                .scale = kScale});
}

std::vector<float> HelperRank::BackwardQueries() const {
  std::vector<float> queries = q_.data;
  for (const std::vector<float>* const more : {&d_out_.data, &lse_, &delta_}) {
    Append(*more, &queries);
  }
  return queries;
}

absl::Status HelperRank::Backward() {
  for (Tensor* gradient : {&dq_, &dk_, &dv_}) std::ranges::fill(gradient->data, 0.0f);
  const Tensor& out = out_;
  kernels::reference::AttentionDelta(engine_, d_out_.view(), out.view(), delta_.data());
  const float *const q = q_.data.data(), *const d_out = d_out_.data.data();
  std::unique_ptr<Arriving> now = Fetch(0, {});
  for (int step = 0; step < StepsOf(ranks()); ++step) {
    std::unique_ptr<Arriving> next;
    if (step + 1 < StepsOf(ranks())) next = Fetch(step + 1, BackwardQueries());
    RETURN_IF_ERROR(Await(*now));
    const Turn turn = Turn::Of(step, rank(), ranks());
    std::vector<float> theirs, mine, found, brought;  // gradients of keys, then of queries
    if (step == 0) {
      RETURN_IF_ERROR(AttendBackward(q, d_out, lse_.data(), delta_.data(), rank(), k_.data.data(),
                                     v_.data.data(), rank(), dq_.data.data(), dk_.data.data(),
                                     dv_.data.data()));
    } else if (turn.owner >= 0) {
      theirs.assign(2 * key_floats(), 0.0f);
      RETURN_IF_ERROR(AttendBackward(q, d_out, lse_.data(), delta_.data(), rank(), now->keys.data(),
                                     now->keys.data() + key_floats(), turn.owner, dq_.data.data(),
                                     theirs.data(), theirs.data() + key_floats()));
    }
    if (turn.helped >= 0) {
      found.assign(query_floats(), 0.0f);
      const float* const sent = now->queries.data();
      RETURN_IF_ERROR(AttendBackward(sent, sent + query_floats(), sent + 2 * query_floats(),
                                     sent + 2 * query_floats() + kHeads * n(), turn.helped,
                                     k_.data.data(), v_.data.data(), rank(), found.data(),
                                     dk_.data.data(), dv_.data.data()));
    }
    if (turn.reader >= 0) mine.resize(2 * key_floats());
    if (turn.helper >= 0) brought.resize(query_floats());
    RETURN_IF_ERROR(Send(Channel::kGradKv, theirs, turn.owner, &mine, turn.reader)->Wait());
    RETURN_IF_ERROR(Send(Channel::kGradKv, found, turn.helped, &brought, turn.helper)->Wait());
    if (turn.reader >= 0) {
      Add(mine.data(), key_floats(), dk_.data.data());
      Add(mine.data() + key_floats(), key_floats(), dv_.data.data());
    }
    if (turn.helper >= 0) Add(brought.data(), query_floats(), dq_.data.data());
    now = std::move(next);
  }
  return absl::OkStatus();
}

void HelperRank::PutInto(Results* results) const {
  const auto put = [&](const Tensor& part, Tensor* whole) {
    std::ranges::copy(part.data, whole->data.begin() + rank() * std::ssize(part.data));
  };
  put(out_, &results->out);
  put(dq_, &results->dq);
  put(dk_, &results->dk);
  put(dv_, &results->dv);
}

}  // namespace

bool HelpersCan(const MaskedSequence& sequence, MaskKind mask, int ranks) {
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

namespace {

attention::RingBytes AllSent(int64_t bytes) {
  return {.sent = static_cast<uint64_t>(bytes), .whole = static_cast<uint64_t>(bytes)};
}

}  // namespace

absl::Status RunHelperRank(const Problem& problem, MaskKind mask, int repetitions,
                           Communicator& communicator, const std::atomic<int64_t>& sent,
                           RankRun* run, Results* results) {
  const auto planning = std::chrono::steady_clock::now();
  ASSIGN_OR_RETURN(
      std::vector<KeyIntervals> rows,
      IntervalsOf(problem.MaskOf(mask), static_cast<int32_t>(problem.tokens), problem.documents));
  run->plan_ms = MillisecondsSince(planning);
  HelperRank rank(problem, std::move(rows), &communicator);
  for (int repetition = -1; repetition < repetitions; ++repetition) {  // the first warms up
    if (repetition >= 0) FlushCaches();
    RETURN_IF_ERROR(communicator.Barrier());
    int64_t before = sent;
    auto start = std::chrono::steady_clock::now();
    RETURN_IF_ERROR(rank.Forward());
    if (repetition >= 0) run->forward_ms.push_back(MillisecondsSince(start));
    run->forward_bytes = AllSent(sent - before);
    if (repetition >= 0) FlushCaches();
    RETURN_IF_ERROR(communicator.Barrier());
    before = sent;
    start = std::chrono::steady_clock::now();
    RETURN_IF_ERROR(rank.Backward());
    if (repetition >= 0) run->backward_ms.push_back(MillisecondsSince(start));
    run->backward_bytes = AllSent(sent - before);
  }
  run->tiles = static_cast<double>(rank.tiles());
  rank.PutInto(results);
  return absl::OkStatus();
}

}  // namespace ringleader::bench
