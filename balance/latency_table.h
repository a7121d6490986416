// What one layer's attention takes on one kind of machine, forward and backward, measured at some
// lengths and densities: the milliseconds of a density, and the density for a time (SparseBalance,
// arXiv 2604.13847, section IV). docs/latency.md says who measures and who believes it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ringleader::balance {

// One measured point. `density`: tiles visited / causal tiles of the whole sequence.
struct Row {
  std::string pattern = {};  // as job files name it
  int tile = 0;              // tokens
  int heads = 0;             // of queries
  int kv_heads = 0;
  int head_dim = 0;
  int64_t tokens = 0;           // of the sequence, all on one rank
  int64_t document_tokens = 0;  // of each of its documents; 0: it is one
  double density = 0;           // in (0, 1]
  // Medians and ninth deciles of repeated calls of forward and backward.
  double p50_ms = 0;
  double p90_ms = 0;
  double forward_p50_ms = 0;  // of p50_ms

  friend bool operator==(const Row&, const Row&) = default;
};

// The rows of one shape (pattern, tile, heads and their size) on one kind of machine, as
// MakeTable() leaves them. Empty: nothing was measured.
struct LatencyTable {
  std::vector<Row> rows = {};

  // Median milliseconds of forward and backward of one layer over `tokens` in documents of
  // `document_tokens` (0: in one), at `density`, or 0 from an empty table. Grows with density.
  // Between densities it is linear, between lengths a power of the length; below the sparsest row
  // it is that row's, and above the last two rows or lengths it goes on as between them. Documents
  // count as those measured that are nearest in length.
  double Predict(double tokens, double density, double document_tokens = 0) const;

  // The largest density up to 1 that takes at most `ms`, so that an anchor is an upper bound;
  // nullopt where the sparsest row takes longer, or nothing was measured.
  std::optional<double> Align(double tokens, double ms, double document_tokens = 0) const;
};

// The non-decreasing values nearest to `values` by least squares: pool adjacent violators (Ayer et
// al., 1955).
std::vector<double> Isotonic(std::span<const double> values);

// `rows` in order, with times that do not fall where density grows. INVALID_ARGUMENT names the row:
// a figure that no measurement gives (not finite, not positive, deciles out of order, a density
// beyond 1), another shape than the first row's, or a point measured twice.
absl::StatusOr<LatencyTable> MakeTable(std::vector<Row> rows);

// A row for people, e.g. "vertical_slash, tile 128, 16/2 heads of 128, 131072 tokens, density
// 0.05".
std::string Describe(const Row& row);

}  // namespace ringleader::balance
