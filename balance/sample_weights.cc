#include "balance/sample_weights.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "absl/strings/str_format.h"

namespace ringleader::balance {
namespace {

// A year: sums of a step's weights stay far from int64's end.
constexpr double kMostMilliseconds = 3.2e10;

}  // namespace

absl::StatusOr<SampleWeights> SampleWeights::Create(std::vector<SampleWeight> rows) {
  SampleWeight last;
  for (const SampleWeight& row : rows) {
    const bool is_number =
        row.milliseconds >= 0 && row.milliseconds <= kMostMilliseconds &&
        row.attention_milliseconds >= 0 && row.attention_milliseconds <= row.milliseconds &&
        row.travel_milliseconds >= 0 && row.travel_milliseconds <= kMostMilliseconds;
    if (is_number && row.tokens > last.tokens && row.milliseconds >= last.milliseconds) {
      last = row;
      continue;
    }
    return absl::InvalidArgumentError(absl::StrFormat(
        "sample weights: %d tokens in %g ms (attention %g, travel %g) after %d in %g ms; tokens "
        "and milliseconds ascend, up to %g ms, attention's are a part of them, and travel's are "
        "not negative",
        row.tokens, row.milliseconds, row.attention_milliseconds, row.travel_milliseconds,
        last.tokens, last.milliseconds, kMostMilliseconds));
  }
  SampleWeights weights;
  weights.rows_ = std::move(rows);
  return weights;
}

double SampleWeights::Interpolate(uint64_t tokens, double SampleWeight::*value) const {
  const auto at = static_cast<double>(tokens);
  const auto above = std::lower_bound(
      rows_.begin(), rows_.end(), tokens,
      [](const SampleWeight& row, uint64_t wanted) { return row.tokens < wanted; });
  if (above == rows_.begin() || above == rows_.end()) {
    const SampleWeight& nearest = above == rows_.end() ? rows_.back() : rows_.front();
    return nearest.*value * at / static_cast<double>(nearest.tokens);
  }
  const SampleWeight& below = *(above - 1);
  const double share =
      (at - static_cast<double>(below.tokens)) / static_cast<double>(above->tokens - below.tokens);
  const double low = below.*value / static_cast<double>(below.tokens);
  const double high = (*above).*value / static_cast<double>(above->tokens);
  if (high > low) return at * (low + share * (high - low));
  return below.*value + share * ((*above).*value - below.*value);
}

int64_t SampleWeights::Microseconds(uint64_t tokens) const {
  if (rows_.empty()) return std::max<int64_t>(1, static_cast<int64_t>(tokens));
  const double milliseconds = Interpolate(tokens, &SampleWeight::milliseconds);
  return std::max<int64_t>(1, std::llround(std::min(milliseconds, kMostMilliseconds) * 1e3));
}

int64_t SampleWeights::AttentionMicroseconds(uint64_t tokens) const {
  if (rows_.empty()) return 0;
  const double milliseconds = Interpolate(tokens, &SampleWeight::attention_milliseconds);
  return std::min(std::llround(std::min(milliseconds, kMostMilliseconds) * 1e3),
                  static_cast<long long>(Microseconds(tokens)));
}

double SampleWeights::TravelMicroseconds(uint64_t tokens) const {
  return rows_.empty() ? 0 : 1e3 * Interpolate(tokens, &SampleWeight::travel_milliseconds);
}

uint64_t SampleWeights::BinOf(uint64_t tokens) const {
  if (rows_.empty()) return std::bit_ceil(tokens);
  const auto above = std::lower_bound(
      rows_.begin(), rows_.end(), tokens,
      [](const SampleWeight& row, uint64_t wanted) { return row.tokens < wanted; });
  return above == rows_.end() ? rows_.back().tokens : above->tokens;
}

}  // namespace ringleader::balance
