// Which points a trainer measures for a latency table, in which order, and when it stops.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "balance/latency_table.h"

namespace ringleader::balance {

struct GridPoint {
  int64_t tokens = 0;
  int64_t document_tokens = 0;  // 0: one document
  double density = 1;           // wished for
};

// One call of forward and backward.
struct Timing {
  double forward_seconds = 0;
  double backward_seconds = 0;
  double density = 0;  // what the call visited; in (0, 1]
};

// Makes a grid: short sequences first, and of each length the sparse ones first, so that what is
// left out when the time is over is what takes longest. Lengths are multiples of `tile` up to
// `longest` tokens, four times apart. `densities`: ascending. `document_tokens`: of the documents
// that longer sequences are measured with, too; 0: of none.
std::vector<GridPoint> MakeGrid(int tile, int64_t longest, const std::vector<double>& densities,
                                int64_t document_tokens);

// Times each point of `grid` several times, after a first call that does not count, and returns
// `shape` with what each took. Leaves out points that, judged by those before, would take it past
// `budget_seconds`, and all points once `stop` says so. Points that come to the density of another
// of their length are left out, too. `measure` runs a point once; its error ends the rest, as
// longer sequences may not fit the memory: it tells of other errors itself. `now` is a clock in
// seconds.
std::vector<Row> MeasureGrid(const Row& shape, const std::vector<GridPoint>& grid,
                             double budget_seconds,
                             absl::FunctionRef<absl::StatusOr<Timing>(const GridPoint&)> measure,
                             absl::FunctionRef<double()> now, absl::FunctionRef<bool()> stop);

}  // namespace ringleader::balance
