#include "kernels/reference/index/index_estimate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_format.h"
#include "kernels/reference/attention/tile_steps.h"
#include "kernels/reference/math/panels.h"

namespace ringleader::kernels::reference {

namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
constexpr int kRun = kMassRun;

// `value` in units of 2^-bits. What is not a number has no mass: the step's loss will say so.
int64_t FixedPoint(float value, int bits) {
  return std::isfinite(value) ? std::llrint(std::ldexp(static_cast<double>(value), bits)) : 0;
}

}  // namespace

absl::StatusOr<IndexEstimate> IndexEstimate::Create(Engine& engine,
                                                    const IndexEstimateArgs<float>& args) {
  if (args.q.tokens < 1 || args.q.tokens > kMaxEstimateQueries) {
    return absl::InvalidArgumentError(absl::StrFormat("%d estimate queries; allowed are 1 to %d",
                                                      args.q.tokens, kMaxEstimateQueries));
  }
  if (args.k.heads < 1 || args.q.heads % args.k.heads != 0 || args.q.head_dim != args.k.head_dim) {
    return absl::InvalidArgumentError("q and k differ in head_dim or kv_heads");
  }
  if (args.tile % kRun != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("tile is %d; must be a multiple of %d", args.tile, kRun));
  }
  return IndexEstimate(engine, args);
}

IndexEstimate::IndexEstimate(Engine& engine, const IndexEstimateArgs<float>& args)
    : engine_(engine),
      args_(args),
      logits_(engine.shared_scratch().Reserve(int64_t{args.q.heads} * QueryRuns() * KeyRuns() *
                                              kRun * kRun)) {}

int64_t IndexEstimate::KeyRuns() const {
  return (args_.k.tokens + kRun - 1) / kRun;
}
int IndexEstimate::QueryRuns() const {
  return static_cast<int>((args_.q.tokens + kRun - 1) / kRun);
}

float* IndexEstimate::Logits(int head, int query_run, int64_t key_run) {
  return logits_ + ((head * QueryRuns() + query_run) * KeyRuns() + key_run) * kRun * kRun;
}

void IndexEstimate::ShiftOf(int head, int query_run, bool with_sum, float* shift) const {
  for (int i = 0; i < kRun; ++i) {
    const int64_t e = query_run * kRun + i;
    const int64_t slot = head * args_.q.tokens + e;
    if (e >= args_.q.tokens || args_.row_max[slot] == kNegativeInfinity) {
      shift[i] = std::numeric_limits<float>::infinity();
      continue;
    }
    shift[i] = args_.row_max[slot] * kLog2E;
    if (with_sum) {
      shift[i] +=
          static_cast<float>(std::log2(static_cast<double>(args_.row_sum[slot])) - kRowSumBits);
    }
  }
}

template <typename Body>
void IndexEstimate::ForRuns(Body body) {
  engine_.pool().For(KeyRuns(), [&](int64_t key_run, int worker) {
    for (int head = 0; head < args_.q.heads; ++head) {
      for (int run = 0; run < QueryRuns(); ++run) {
        const int rows =
            static_cast<int>(std::min<int64_t>(kRun, args_.q.tokens - int64_t{run} * kRun));
        body(head, run, rows, key_run, worker);
      }
    }
  });
}

void IndexEstimate::RowMax() {
  const TileMath& math = engine_.math();
  const int d = args_.q.head_dim, group = args_.q.heads / args_.k.heads;
  const int64_t estimates = args_.q.tokens;
  std::vector<float> q(args_.q.heads * estimates * d);
  for (int head = 0; head < args_.q.heads; ++head) {
    PackRows(args_.q.data + head * args_.q.head_stride, args_.q.token_stride,
             static_cast<int>(estimates), d, args_.scale * kLog2E, q.data() + head * estimates * d);
  }
  const int64_t slots = args_.q.heads * estimates;
  std::vector<float> maxima(engine_.pool().threads() * slots, kNegativeInfinity);
  ForRuns([&](int head, int run, int rows, int64_t key_run, int worker) {
    const int64_t begin = key_run * kRun;
    const int keys = static_cast<int>(std::min<int64_t>(kRun, args_.k.tokens - begin));
    float* keys_t = engine_.worker_scratch(worker).Reserve(int64_t{kRun} * d);
    if (head % group == 0 && run == 0) {
      PackTransposed(
          args_.k.data + begin * args_.k.token_stride + head / group * args_.k.head_stride,
          args_.k.token_stride, keys, d, math.panel, keys_t);
    }
    float* s = Logits(head, run, key_run);
    const int columns = static_cast<int>(RoundUp(keys, math.panel));
    math.gemm(rows, columns, d, q.data() + (head * estimates + int64_t{run} * kRun) * d, d, 1,
              keys_t, int64_t{d} * math.panel, s, kRun, false);
    const int64_t first = args_.key_layout.Position(begin);
    for (int i = 0; i < kRun; ++i) {
      int64_t hidden = 0, visible = 0;  // keys [hidden, visible) count
      if (i < rows) {
        const int64_t e = int64_t{run} * kRun + i;
        visible = std::clamp<int64_t>(args_.query_positions[e] - first + 1, 0, keys);
        if (args_.query_starts != nullptr) {
          hidden = std::clamp<int64_t>(args_.query_starts[e] - first, 0, visible);
        }
      }
      float* const row = s + int64_t{i} * kRun;
      std::fill(row, row + hidden, kNegativeInfinity);
      std::fill(row + visible, row + kRun, kNegativeInfinity);
    }
    math.row_maximum(rows, kRun, s, kRun,
                     maxima.data() + worker * slots + head * estimates + int64_t{run} * kRun);
  });
  for (int64_t slot = 0; slot < slots; ++slot) {
    float top = kNegativeInfinity;
    for (int worker = 0; worker < engine_.pool().threads(); ++worker) {
      top = std::max(top, maxima[worker * slots + slot]);
    }
    args_.row_max[slot] = top * kLn2;
  }
}

void IndexEstimate::RowSum() {
  const int64_t estimates = args_.q.tokens, slots = args_.q.heads * estimates;
  std::vector<int64_t> sums(engine_.pool().threads() * slots, 0);
  ForRuns([&](int head, int run, int rows, int64_t key_run, int worker) {
    float shift[kRun], row_sums[kRun];
    ShiftOf(head, run, false, shift);
    engine_.math().exp2_row_sums(rows, kRun, Logits(head, run, key_run), kRun, shift, row_sums);
    int64_t* mine = sums.data() + worker * slots + head * estimates + int64_t{run} * kRun;
    for (int i = 0; i < rows; ++i) {
      mine[i] += FixedPoint(row_sums[i], kRowSumBits);
    }
  });
  for (int64_t slot = 0; slot < slots; ++slot) {
    args_.row_sum[slot] = 0;
    for (int worker = 0; worker < engine_.pool().threads(); ++worker) {
      args_.row_sum[slot] += sums[worker * slots + slot];
    }
  }
}

void IndexEstimate::Mass() {
  const int64_t blocks = (args_.key_layout.tokens + args_.tile - 1) / args_.tile;
  const int64_t diagonal_slots = args_.q.heads * blocks;
  std::vector<int32_t> diagonals(engine_.pool().threads() * diagonal_slots, 0);
  std::fill_n(args_.column_mass, args_.q.heads * args_.k.tokens, 0);
  ForRuns([&](int head, int run, int rows, int64_t key_run, int worker) {
    float shift[kRun], sums[kRun];
    ShiftOf(head, run, true, shift);
    float* s = Logits(head, run, key_run);
    engine_.math().exp2_column_sums(rows, kRun, s, kRun, shift, sums);
    const int64_t begin = key_run * kRun;
    const int keys = static_cast<int>(std::min<int64_t>(kRun, args_.k.tokens - begin));
    int32_t* columns = args_.column_mass + head * args_.k.tokens + begin;
    int32_t total = 0;
    for (int j = 0; j < keys; ++j) {
      const int32_t mass = static_cast<int32_t>(FixedPoint(sums[j], kMassBits));
      columns[j] += mass;
      total += mass;
    }
    int32_t* mine = diagonals.data() + worker * diagonal_slots + head * blocks;
    const int64_t key_block = args_.key_layout.Position(begin) / args_.tile;
    const int64_t* positions = args_.query_positions + int64_t{run} * kRun;
    if (positions[0] / args_.tile == positions[rows - 1] / args_.tile) {
      const int64_t delta = positions[0] / args_.tile - key_block;
      if (delta >= 0) mine[delta] += total;
      return;
    }
    // A run of queries over several blocks: a sum for each query.
    engine_.math().exp2_row_sums(rows, kRun, s, kRun, shift, sums);
    for (int i = 0; i < rows; ++i) {
      const int64_t delta = positions[i] / args_.tile - key_block;
      if (delta >= 0) mine[delta] += static_cast<int32_t>(FixedPoint(sums[i], kMassBits));
    }
  });
  for (int64_t slot = 0; slot < diagonal_slots; ++slot) {
    args_.diagonal_mass[slot] = 0;
    for (int worker = 0; worker < engine_.pool().threads(); ++worker) {
      args_.diagonal_mass[slot] += diagonals[worker * diagonal_slots + slot];
    }
  }
}

void IndexEstimate::KeptMass(int stride, const uint64_t* diagonals, int diagonal_words,
                             const char* columns, double* kept) {
  engine_.pool().For(args_.q.heads, [&](int64_t head, int) {
    double sum = 0.0;
    for (int run = 0; run < QueryRuns(); ++run) {
      float shift[kRun], p[kRun];
      ShiftOf(static_cast<int>(head), run, true, shift);
      for (int64_t key_run = 0; key_run < KeyRuns(); ++key_run) {
        const int64_t begin = key_run * kRun;
        const int keys = static_cast<int>(std::min<int64_t>(kRun, args_.k.tokens - begin));
        const int64_t key_block = args_.key_layout.Position(begin) / args_.tile;
        const char* selected = columns + head * args_.k.tokens + begin;
        for (int64_t e = RoundUp(int64_t{run} * kRun, stride);
             e < std::min<int64_t>(args_.q.tokens, int64_t{run + 1} * kRun); e += stride) {
          const int64_t delta = args_.query_positions[e] / args_.tile - key_block;
          if (delta < 0) continue;
          const bool on_diagonal =
              diagonals[head * diagonal_words + delta / 64] >> (delta % 64) & 1;
          if (!on_diagonal && std::none_of(selected, selected + keys, [](char c) { return c; })) {
            continue;
          }
          engine_.math().exp2(
              keys, shift[e - int64_t{run} * kRun],
              Logits(static_cast<int>(head), run, key_run) + (e - int64_t{run} * kRun) * kRun, p);
          for (int j = 0; j < keys; ++j) {
            if (on_diagonal || selected[j]) sum += p[j];
          }
        }
      }
    }
    kept[head] = sum;
  });
}

}  // namespace ringleader::kernels::reference
