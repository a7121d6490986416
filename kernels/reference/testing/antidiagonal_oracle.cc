#include "kernels/reference/testing/antidiagonal_oracle.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"

namespace ringleader::kernels::reference::testing {

AntidiagonalLogits::AntidiagonalLogits(const TokenMajor<const float>& q,
                                       const TokenMajor<const float>& k, int64_t stride)
    : heads(q.heads), tokens(q.tokens), stride(stride), groups(q.tokens / stride) {
  sums.reserve(heads * groups * groups);
  for (int head = 0; head < heads; ++head) {
    const float* const queries = q.data + head * q.head_stride;
    const float* const keys = k.data + head / (heads / k.heads) * k.head_stride;
    for (int64_t first = 0; first < groups * stride; first += stride) {
      for (int64_t key = 0; key < groups * stride; key += stride) {
        double sum = 0.0;
        for (int64_t i = 0; i < stride; ++i) {
          const float* const query_row = queries + (first + i) * q.token_stride;
          const float* const key_row = keys + (key + stride - 1 - i) * k.token_stride;
          for (int x = 0; x < q.head_dim; ++x) sum += double{query_row[x]} * double{key_row[x]};
        }
        sums.push_back(sum);
      }
    }
  }
}

AntidiagonalOracle::AntidiagonalOracle(const AntidiagonalLogits& logits,
                                       const AntidiagonalGateStep& step, const Sight& sight)
    : step_(step),
      sight_(sight),
      heads_(logits.heads),
      tokens_(logits.tokens),
      blocks_((tokens_ + step.tile - 1) / step.tile),
      mass_(heads_ * blocks_ * blocks_, 0.0) {
  const int64_t stride = logits.stride;
  const double scale = double{step.scale} / static_cast<double>(stride);
  auto row = logits.sums.begin();
  for (int head = 0; head < heads_; ++head) {
    for (int64_t group = 0; group < logits.groups; ++group, row += logits.groups) {
      const int64_t first = group * stride;
      std::vector<double> weight;
      double sum = 0.0;
      for (int64_t key = 0; key < logits.groups * stride; key += stride) {
        const bool seen = key + stride > sight.Begin(first) && key < sight.End(first + stride - 1);
        weight.push_back(seen ? std::exp(row[key / stride] * scale) : 0.0);
        sum += weight.back();
      }
      double* const mass = &mass_[(head * blocks_ + first / step.tile) * blocks_];
      for (int64_t key = 0; key < logits.groups; ++key) {
        mass[key * stride / step.tile] += weight[key] / sum;
      }
    }
  }
}

int64_t AntidiagonalOracle::Most(int head, int64_t tile, int64_t first, int64_t seen) const {
  int64_t most = seen;
  if (step_.density > 0) {
    most = static_cast<int64_t>(std::floor(double{step_.density} * static_cast<double>(seen)));
  }
  const int64_t others = std::max<int64_t>(most - (first == tile ? 1 : 2), 0);
  const int32_t halves = step_.head_halves == nullptr ? 2 : step_.head_halves[head];
  if (halves == 1) most -= others / 2;
  if (halves == 3) most += others / 2;
  return most;
}

std::string AntidiagonalOracle::Complaint(int head, int64_t tile, const std::vector<int64_t>& kept,
                                          double tolerance) const {
  const int64_t query = tile * step_.tile, behind = std::min(query + step_.tile, tokens_);
  const int64_t first = sight_.Begin(query) / step_.tile,
                last = (sight_.End(behind - 1) - 1) / step_.tile, seen = last - first + 1;
  const auto is_kept = [&](int64_t block) { return std::ranges::binary_search(kept, block); };
  const auto where = [&](const char* what, int64_t block) {
    return absl::StrFormat("head %d, tile %d: block %d %s", head, tile, block, what);
  };
  if (!is_kept(tile)) return where("is its own and left", tile);
  if (!is_kept(first)) return where("is the first and left", first);
  double total = 0.0, held = 0.0, least = INFINITY, best_left = 0.0;
  for (int64_t block = 0; block < blocks_; ++block) {
    const double mass = Mass(head, tile, block);
    if (!sight_.Meets(query, behind - 1, block, step_.tile)) {
      if (is_kept(block)) return where("is not seen and kept", block);
      continue;
    }
    total += mass;
    if (!is_kept(block)) {
      best_left = std::max(best_left, mass);
      continue;
    }
    held += mass;
    if (block != first && block != tile) least = std::min(least, mass);
  }
  const auto count = static_cast<int64_t>(kept.size());
  const bool others = std::isfinite(least);
  const double target = step_.threshold * total;
  const int64_t most = Most(head, tile, first, seen);
  if (others && least < best_left - tolerance) return where("is left, one of less is kept", tile);
  if (others && count > most) return where("keeps more than its share", tile);
  if (count < most && held < target - tolerance && best_left > tolerance)
    return where("keeps too little", tile);
  if (others && held - least > target + tolerance) return where("keeps too much", tile);
  return "";
}

std::string AntidiagonalOracle::Complaint(const uint32_t* chosen, const ShardLayout& layout,
                                          double tolerance) const {
  const int64_t tiles = (layout.local_tokens() + step_.tile - 1) / step_.tile;
  const int64_t words = BlockWords(static_cast<int32_t>(blocks_));
  for (int64_t row = 0; row < heads_ * tiles; ++row) {
    std::vector<int64_t> kept;
    for (int64_t block = 0; block < blocks_; ++block) {
      if ((chosen[row * words + block / 32] >> block % 32 & 1) != 0) kept.push_back(block);
    }
    std::string wrong =
        Complaint(static_cast<int>(row / tiles),
                  layout.Position(row % tiles * step_.tile) / step_.tile, kept, tolerance);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

}  // namespace ringleader::kernels::reference::testing
