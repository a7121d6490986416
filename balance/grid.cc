#include "balance/grid.h"

#include <algorithm>
#include <cmath>

namespace ringleader::balance {
namespace {

constexpr int64_t kShortest = 2048;  // tokens; what is shorter takes no time that matters
constexpr int kRepeats = 5;
// Densities as near as this are the same point.
constexpr double kSameDensity = 0.05;

// `sorted` ascending.
double Quantile(const std::vector<double>& sorted, double share) {
  const auto last = static_cast<double>(sorted.size() - 1);
  return sorted[static_cast<size_t>(std::lround(share * last))];
}

Row RowOf(const Row& shape, const GridPoint& point, const std::vector<Timing>& timings) {
  std::vector<double> forward, both;
  for (const Timing& timing : timings) {
    forward.push_back(1e3 * timing.forward_seconds);
    both.push_back(1e3 * (timing.forward_seconds + timing.backward_seconds));
  }
  std::sort(forward.begin(), forward.end());
  std::sort(both.begin(), both.end());
  Row row = shape;
  row.tokens = point.tokens;
  row.document_tokens = point.document_tokens;
  row.density = timings.front().density;
  row.p50_ms = Quantile(both, 0.5);
  row.p90_ms = Quantile(both, 0.9);
  row.forward_p50_ms = Quantile(forward, 0.5);
  return row;
}

// Predicts one call at `point` from the rows so far, or 0 before there are any.
double ExpectedSeconds(const std::vector<Row>& rows, const GridPoint& point) {
  const absl::StatusOr<LatencyTable> table = MakeTable(rows);
  if (!table.ok()) return 0;
  return 1e-3 * table->Predict(static_cast<double>(point.tokens), point.density,
                               static_cast<double>(point.document_tokens));
}

bool IsThere(const std::vector<Row>& rows, const GridPoint& point, double density) {
  return std::any_of(rows.begin(), rows.end(), [&](const Row& row) {
    return row.tokens == point.tokens && row.document_tokens == point.document_tokens &&
           std::abs(row.density / density - 1) < kSameDensity;
  });
}

}  // namespace

std::vector<GridPoint> MakeGrid(int tile, int64_t longest, const std::vector<double>& densities,
                                int64_t document_tokens) {
  std::vector<int64_t> lengths;
  for (int64_t tokens = kShortest; tokens < longest; tokens *= 4) lengths.push_back(tokens);
  lengths.push_back(longest / tile * tile);
  std::vector<GridPoint> grid;
  for (const int64_t tokens : lengths) {
    if (tokens < tile) continue;
    for (const double density : densities) grid.push_back({.tokens = tokens, .density = density});
    if (document_tokens == 0 || document_tokens >= tokens) continue;
    for (const double density : densities) {
      grid.push_back({.tokens = tokens, .document_tokens = document_tokens, .density = density});
    }
  }
  return grid;
}

std::vector<Row> MeasureGrid(const Row& shape, const std::vector<GridPoint>& grid,
                             double budget_seconds,
                             absl::FunctionRef<absl::StatusOr<Timing>(const GridPoint&)> measure,
                             absl::FunctionRef<double()> now, absl::FunctionRef<bool()> stop) {
  const double end = now() + budget_seconds;
  std::vector<Row> rows;
  for (const GridPoint& point : grid) {
    if (now() + (kRepeats + 1) * ExpectedSeconds(rows, point) >= end) continue;
    std::vector<Timing> timings;
    for (int i = 0; i <= kRepeats; ++i) {
      if (stop() || now() >= end) return rows;
      const absl::StatusOr<Timing> timing = measure(point);
      if (!timing.ok()) return rows;
      if (IsThere(rows, point, timing->density)) break;
      if (i > 0) timings.push_back(*timing);  // the first one loads code and memory
    }
    if (!timings.empty()) rows.push_back(RowOf(shape, point, timings));
  }
  return rows;
}

}  // namespace ringleader::balance
