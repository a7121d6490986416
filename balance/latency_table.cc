#include "balance/latency_table.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace ringleader::balance {
namespace {

// Beyond these a figure is no measurement of a layer: a day, and a hundred million tokens.
constexpr double kMostMs = 86400e3;
constexpr int64_t kMostTokens = 100'000'000;
constexpr int kMostHeads = 65536;
constexpr size_t kMostNameBytes = 64;

auto Place(const Row& row) {
  return std::tuple(row.document_tokens, row.tokens, row.density);
}

auto Shape(const Row& row) {
  return std::tuple(std::string_view(row.pattern), row.tile, row.heads, row.kv_heads, row.head_dim);
}

absl::Status Refused(const Row& row, std::string_view why) {
  return absl::InvalidArgumentError(absl::StrFormat("latency row (%s): %s", Describe(row), why));
}

bool IsTime(double ms) {
  return ms > 0 && ms <= kMostMs;
}  // a NaN is not

absl::Status Check(const Row& row) {
  const auto in = [](int64_t value, int64_t most) { return value >= 1 && value <= most; };
  if (row.pattern.empty() || row.pattern.size() > kMostNameBytes)
    return Refused(row, "its pattern has no name");
  if (!in(row.tile, kMostTokens) || !in(row.heads, kMostHeads) || !in(row.kv_heads, row.heads) ||
      row.heads % row.kv_heads != 0 || !in(row.head_dim, kMostHeads)) {
    return Refused(row, "there is no attention of this shape");
  }
  if (!in(row.tokens, kMostTokens)) return Refused(row, "there is no sequence of this length");
  if (row.document_tokens < 0 || row.document_tokens >= row.tokens) {
    return Refused(row, absl::StrFormat("documents of %d tokens are not parts of the sequence",
                                        row.document_tokens));
  }
  if (!(row.density > 0 && row.density <= 1)) return Refused(row, "its density is not in (0, 1]");
  if (!IsTime(row.p50_ms) || !IsTime(row.p90_ms) || !IsTime(row.forward_p50_ms) ||
      row.p90_ms < row.p50_ms || row.forward_p50_ms >= row.p50_ms) {
    return Refused(row, absl::StrFormat("no measurement gives %g ms (p50, of which forward %g) and "
                                        "%g ms (p90)",
                                        row.p50_ms, row.forward_p50_ms, row.p90_ms));
  }
  return absl::OkStatus();
}

// Rows of one length in documents of one length, ascending in density.
using Curve = std::span<const Row>;

// Smooths forward and backward each by itself, so that either may be believed alone.
void Smooth(std::span<Row> curve) {
  std::vector<double> forward, backward, p90;
  for (const Row& row : curve) {
    forward.push_back(row.forward_p50_ms);
    backward.push_back(row.p50_ms - row.forward_p50_ms);
    p90.push_back(row.p90_ms);
  }
  forward = Isotonic(forward), backward = Isotonic(backward), p90 = Isotonic(p90);
  for (size_t i = 0; i < curve.size(); ++i) {
    curve[i].forward_p50_ms = forward[i];
    curve[i].p50_ms = forward[i] + backward[i];
    curve[i].p90_ms = std::max(p90[i], curve[i].p50_ms);
  }
}

double TokensOf(Curve curve) {
  return static_cast<double>(curve.front().tokens);
}

double OnCurve(Curve curve, double density) {
  if (density <= curve.front().density) return curve.front().p50_ms;
  auto above = std::find_if(curve.begin(), curve.end(),
                            [&](const Row& row) { return row.density >= density; });
  if (curve.size() == 1) return curve.front().p50_ms * density / curve.front().density;
  if (above == curve.end()) --above;
  const Row &low = *(above - 1), &high = *above;
  const double slope = (high.p50_ms - low.p50_ms) / (high.density - low.density);
  return low.p50_ms + slope * (density - low.density);
}

// Returns the rows at the front that `same` finds like the first.
template <typename Same>
Curve Run(std::span<const Row> rows, const Same& same) {
  const auto end = std::find_if(rows.begin(), rows.end(),
                                [&](const Row& row) { return !same(row, rows.front()); });
  return rows.first(end - rows.begin());
}

bool SameDocuments(const Row& a, const Row& b) {
  return a.document_tokens == b.document_tokens;
}
bool SameTokens(const Row& a, const Row& b) {
  return a.tokens == b.tokens;
}

// Returns the rows whose documents are nearest in length to these, by ratio.
Curve NearestDocuments(std::span<const Row> rows, double tokens, double document_tokens) {
  const auto length = [&](double of) { return of > 0 ? std::min(of, tokens) : tokens; };
  Curve best;
  double best_distance = 0;
  while (!rows.empty()) {
    const Curve run = Run(rows, SameDocuments);
    const auto documents = static_cast<double>(run.front().document_tokens);
    const double distance = std::abs(std::log(length(documents) / length(document_tokens)));
    if (best.empty() || distance < best_distance) {
      best = run;
      best_distance = distance;
    }
    rows = rows.subspan(run.size());
  }
  return best;
}

}  // namespace

std::string Describe(const Row& row) {
  return absl::StrFormat("%.*s, tile %d, %d/%d heads of %d, %d tokens, density %g",
                         static_cast<int>(std::min(row.pattern.size(), kMostNameBytes)),
                         row.pattern, row.tile, row.heads, row.kv_heads, row.head_dim, row.tokens,
                         row.density);
}

std::vector<double> Isotonic(std::span<const double> values) {
  struct Pool {
    double sum;
    size_t count;
    double mean() const { return sum / static_cast<double>(count); }
  };
  std::vector<Pool> pools;
  for (const double value : values) {
    pools.push_back({value, 1});
    while (pools.size() > 1 && pools[pools.size() - 2].mean() > pools.back().mean()) {
      const Pool last = pools.back();
      pools.pop_back();
      pools.back().sum += last.sum;
      pools.back().count += last.count;
    }
  }
  std::vector<double> result;
  for (const Pool& pool : pools) result.insert(result.end(), pool.count, pool.mean());
  return result;
}

absl::StatusOr<LatencyTable> MakeTable(std::vector<Row> rows) {
  for (const Row& row : rows) {
    RETURN_IF_ERROR(Check(row));
    if (Shape(row) != Shape(rows.front())) {
      return Refused(row,
                     absl::StrFormat("the table is of another shape (%s)", Describe(rows.front())));
    }
  }
  std::sort(rows.begin(), rows.end(),
            [](const Row& a, const Row& b) { return Place(a) < Place(b); });
  for (size_t i = 1; i < rows.size(); ++i) {
    if (Place(rows[i - 1]) == Place(rows[i])) return Refused(rows[i], "it is there twice");
  }
  for (std::span<Row> rest = rows; !rest.empty();) {
    const size_t size = Run(Run(rest, SameDocuments), SameTokens).size();
    Smooth(rest.first(size));
    rest = rest.subspan(size);
  }
  return LatencyTable{.rows = std::move(rows)};
}

double LatencyTable::Predict(double tokens, double density, double document_tokens) const {
  if (rows.empty() || !(tokens > 0)) return 0;
  // The two lengths around `tokens`, or the two nearest on its one side.
  Curve low, high;
  for (Curve rest = NearestDocuments(rows, tokens, document_tokens); !rest.empty();) {
    if (!low.empty() && TokensOf(high) >= tokens) break;
    low = high;
    high = Run(rest, SameTokens);
    rest = rest.subspan(high.size());
  }
  // Where one length was measured, times grow like tiles above it, and like tokens below.
  if (low.empty()) {
    const double ratio = tokens / TokensOf(high);
    return OnCurve(high, density) * (ratio > 1 ? ratio * ratio : ratio);
  }
  const auto exponent_at = [&](double of) {
    return std::log(OnCurve(high, of) / OnCurve(low, of)) /
           std::log(TokensOf(high) / TokensOf(low));
  };
  // Outside of the lengths one power holds for all densities, so that times grow with density
  // there.
  if (tokens < TokensOf(low)) {
    const double exponent = std::clamp(exponent_at(1), 0.0, 2.0);
    return OnCurve(low, density) * std::pow(tokens / TokensOf(low), exponent);
  }
  const double exponent =
      tokens > TokensOf(high) ? std::clamp(exponent_at(1), 1.0, 2.0) : exponent_at(density);
  return OnCurve(high, density) * std::pow(tokens / TokensOf(high), exponent);
}

std::optional<double> LatencyTable::Align(double tokens, double ms, double document_tokens) const {
  double low = 0, high = 1;
  if (rows.empty() || !(Predict(tokens, low, document_tokens) <= ms)) return std::nullopt;
  if (Predict(tokens, high, document_tokens) <= ms) return high;
  while (high - low > 1e-9) {
    const double middle = (low + high) / 2;
    (Predict(tokens, middle, document_tokens) <= ms ? low : high) = middle;
  }
  return low;
}

}  // namespace ringleader::balance
