#include "bench/longca/kernel_cells.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <new>
#include <random>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "bench/longca/problem.h"
#include "kernels/reference/attention/attention.h"

namespace ringleader::bench {
namespace {

using kernels::KeyIntervals;
using kernels::MaskKind;
using kernels::TilePattern;
using kernels::TileSelection;
using kernels::reference::Engine;
using kernels::reference::testing::Tensor;

constexpr int64_t kCheckedTokens = 448;  // in fp64

double Milliseconds(std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - since)
      .count();
}

// Tiles of all heads, [heads, tiles, tiles].
std::vector<char> Draw(const Choice& choice, int64_t tiles) {
  if (choice.kind == Choice::Kind::kAll) return {};
  std::mt19937_64 random(kSeed);
  const auto hits = [&](double share) {
    return static_cast<double>(random() >> 11) * 0x1p-53 < share;
  };
  std::vector<int64_t> block_of;  // a tile's
  for (int64_t block = 0; std::ssize(block_of) < tiles; ++block) {
    const bool is_variable = choice.kind == Choice::Kind::kVariable;
    block_of.insert(block_of.end(), is_variable ? 1 + random() % kLongestBlock : 1, block);
  }
  const int64_t blocks = block_of.back() + 1;
  std::vector<char> visits(kHeads * tiles * tiles);
  for (int head = 0; head < kHeads; ++head) {
    std::vector<char> is_heavy(blocks), is_stride(blocks), is_drawn(blocks * blocks);
    if (choice.kind == Choice::Kind::kLearned) {
      const double near = 4.0 / static_cast<double>(tiles);  // of a row: sink and neighbours
      // Half of what these leave goes to columns, half to diagonals.
      for (std::vector<char>* const lines : {&is_heavy, &is_stride}) {
        for (char& line : *lines) line = hits(std::max(0.0, choice.density - near) / 2);
      }
    } else {
      for (char& drawn : is_drawn) drawn = hits(choice.density);
    }
    for (int64_t a = 0; a < tiles; ++a) {
      for (int64_t b = 0; b < tiles; ++b) {
        const bool is_learned =
            b == 0 || std::abs(a - b) <= 1 || is_heavy[b] != 0 || is_stride[std::abs(a - b)] != 0;
        const bool is_kept = choice.kind == Choice::Kind::kLearned
                                 ? is_learned
                                 : a == b || is_drawn[block_of[a] * blocks + block_of[b]] != 0;
        visits[(head * tiles + a) * tiles + b] = static_cast<char>(is_kept);
      }
    }
  }
  return visits;
}

// A mask over a problem as the kernels take it.
class Selection {
 public:
  static absl::StatusOr<Selection> Make(const Problem& problem, MaskKind kind,
                                        const Choice& choice) {
    Selection made;
    ASSIGN_OR_RETURN(
        made.rows_,
        IntervalsOf(problem.MaskOf(kind), static_cast<int32_t>(problem.tokens), problem.documents));
    made.tiles_ = (problem.tokens + kTile - 1) / kTile;
    made.visits_ = Draw(choice, made.tiles_);
    for (int64_t row = 0; !made.visits_.empty() && row < kHeads * made.tiles_; ++row) {
      if (row % made.tiles_ == 0) {
        made.offsets_.push_back(static_cast<int32_t>(made.columns_.size()));
      }
      for (int64_t b = 0; b < made.tiles_; ++b) {
        if (made.visits_[row * made.tiles_ + b] != 0) {
          made.columns_.push_back(static_cast<int32_t>(b));
        }
      }
      made.offsets_.push_back(static_cast<int32_t>(made.columns_.size()));
    }
    return made;
  }

  TileSelection tiles() const {
    return {.pattern = visits_.empty() ? TilePattern::kFull : TilePattern::kCsr,
            .tile = kTile,
            .row_offsets = offsets_.data(),
            .columns = columns_.data(),
            .intervals = rows_.data()};
  }
  bool Visits(int head, int64_t query, int64_t key) const {
    return visits_.empty() || visits_[(head * tiles_ + query / kTile) * tiles_ + key / kTile] != 0;
  }

  // The share of all tokens² pairs that is visited, as a mean over heads.
  double share() const {
    const auto tokens = static_cast<int64_t>(rows_.size());
    if (visits_.empty()) {
      return static_cast<double>(kernels::VisiblePairs(rows_)) /
             static_cast<double>(tokens * tokens);
    }
    int64_t pairs = 0;
    for (int64_t row = 0; row < kHeads * tiles_; ++row) {
      for (int64_t b = 0; b < tiles_; ++b) {
        if (visits_[row * tiles_ + b] == 0) continue;
        const int64_t begin = row % tiles_ * kTile, end = std::min(begin + kTile, tokens);
        for (int64_t i = begin; i < end; ++i) pairs += Within(rows_[i], b * kTile);
      }
    }
    return static_cast<double>(pairs) / static_cast<double>(kHeads * tokens * tokens);
  }

 private:
  // Keys of the tile that begins at `first`.
  static int64_t Within(const KeyIntervals& row, int64_t first) {
    const auto part = [&](int64_t begin, int64_t end) {
      return std::max<int64_t>(0, std::min(end, first + kTile) - std::max(begin, first));
    };
    return part(row.begin, row.end) + part(row.second_begin, row.second_end);
  }

  int64_t tiles_ = 0;
  std::vector<KeyIntervals> rows_;
  std::vector<char> visits_;
  std::vector<int32_t> offsets_, columns_;
};

struct Run {
  Run(const Problem& problem, const TileSelection& selection, Engine* cpu)
      : p(problem),
        tiles(selection),
        engine(*cpu),
        out(p.tokens, kHeads, kHeadDim),
        dq(out),
        dk(p.tokens, kKvHeads, kHeadDim),
        dv(dk),
        lse(kHeads * p.tokens),
        delta(lse.size()) {}

  absl::Status Forward() {
    std::ranges::fill(out.data, 0.0f);
    std::ranges::fill(lse, -std::numeric_limits<float>::infinity());
    return kernels::reference::AttentionForward(engine, {.q = p.q.view(),
                                                         .k = p.k.view(),
                                                         .v = p.v.view(),
                                                         .out = out.view(),
                                                         .lse = lse.data(),
                                                         .query_layout = {.tokens = p.tokens},
                                                         .key_layout = {.tokens = p.tokens},
                                                         .tiles = tiles,
                                                         .scale = scale});
  }
  absl::Status Backward() {
    for (Tensor* gradient : {&dq, &dk, &dv}) std::ranges::fill(gradient->data, 0.0f);
    const Tensor& read = out;
    kernels::reference::AttentionDelta(engine, p.d_out.view(), read.view(), delta.data());
    return kernels::reference::AttentionBackward(engine, {.q = p.q.view(),
                                                          .k = p.k.view(),
                                                          .v = p.v.view(),
                                                          .d_out = p.d_out.view(),
                                                          .lse = lse.data(),
                                                          .delta = delta.data(),
                                                          .dq = dq.view(),
                                                          .dk = dk.view(),
                                                          .dv = dv.view(),
                                                          .query_layout = {.tokens = p.tokens},
                                                          .key_layout = {.tokens = p.tokens},
                                                          .tiles = tiles,
                                                          .scale = scale});
  }

  const Problem& p;
  const TileSelection tiles;
  Engine& engine;
  const float scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));
  Tensor out, dq, dk, dv;
  std::vector<float> lse, delta;
};

absl::StatusOr<double> ErrorOf(MaskKind kind, const Choice& choice, const DocumentLengths& lengths,
                               Engine* engine) {
  const Problem problem(kCheckedTokens, kSeed, lengths);
  ASSIGN_OR_RETURN(const Selection selection, Selection::Make(problem, kind, choice));
  Run run(problem, selection.tiles(), engine);
  RETURN_IF_ERROR(run.Forward());
  RETURN_IF_ERROR(run.Backward());
  const auto visits = [&](int head, int64_t query, int64_t key) {
    return selection.Visits(head, query, key);
  };
  return LargestError(problem.Expected(problem.MaskOf(kind), visits), run.out, run.dq, run.dk,
                      run.dv);
}

absl::Status Measure(MaskKind kind, const Choice& choice, const DocumentLengths& lengths,
                     int threads, int repetitions, std::vector<Cell>* cells) {
  Engine engine(threads);
  ASSIGN_OR_RETURN(const double error, ErrorOf(kind, choice, lengths, &engine));
  const Problem problem(cells->front().tokens, kSeed, lengths);
  TakePeakMib();
  const auto planning = std::chrono::steady_clock::now();
  ASSIGN_OR_RETURN(const Selection selection, Selection::Make(problem, kind, choice));
  const double plan_ms = Milliseconds(planning);
  Run run(problem, selection.tiles(), &engine);
  for (Cell& cell : *cells) {
    std::vector<double> times;
    for (int repetition = -1; repetition < repetitions; ++repetition) {  // the first warms up
      FlushCaches();
      const auto start = std::chrono::steady_clock::now();
      RETURN_IF_ERROR(cell.direction == "forward" ? run.Forward() : run.Backward());
      if (repetition >= 0) times.push_back(Milliseconds(start));
    }
    SetTimes({{times}}, &cell);
    cell.share = selection.share();
    cell.plan_ms = plan_ms;
    cell.error = error;
    cell.peak_mib = TakePeakMib();
  }
  return absl::OkStatus();
}

}  // namespace

std::string Choice::name() const {
  switch (kind) {
    case Kind::kAll:
      return "all";
    case Kind::kUniform:
      return absl::StrFormat("uniform %g %%", 100 * density);
    case Kind::kVariable:
      return absl::StrFormat("variable %g %%", 100 * density);
    case Kind::kLearned:
      return absl::StrFormat("learned %g %%", 100 * density);
  }
  return "";
}

std::vector<Cell> KernelCells(MaskKind mask, const Choice& choice, int64_t tokens, int threads,
                              int repetitions, const DocumentLengths& lengths) {
  std::vector<Cell> cells;
  for (const char* direction : {"forward", "backward"}) {
    cells.push_back({.mask = std::string(MaskName(mask)),
                     .choice = choice.name(),
                     .scheme = "one rank",
                     .direction = direction,
                     .tokens = tokens});
  }
  std::string note;
  try {
    const absl::Status measured = Measure(mask, choice, lengths, threads, repetitions, &cells);
    if (!measured.ok()) note = std::string(measured.message());
  } catch (const std::bad_alloc&) {
    note = "out of memory";
  }
  for (Cell& cell : cells) cell.note = note;
  return cells;
}

}  // namespace ringleader::bench
