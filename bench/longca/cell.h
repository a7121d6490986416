// A cell of the bench's tables: what was measured of one mask, in one direction.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace ringleader::bench {

// How the repetitions of a cell spread.
struct Spread {
  double median = 0, p20 = 0, p80 = 0;
};
// `values` are one or more.
Spread SpreadOf(std::vector<double> values);

struct Cell {
  std::string mask;    // kernels/masks/masks.h
  std::string choice;  // which of the mask's tiles are visited: "all", "uniform 5 %", "learned 5 %"
  std::string scheme;  // how ranks share the sequence: "one rank", "flat striped"
  std::string direction;
  int64_t tokens = 0;
  int ranks = 1;
  std::string note = {};  // "unsupported", "out of memory", or what went wrong; empty: measured
  double share = 0;       // pairs visited, of tokens²
  // Milliseconds without the plan: of the slowest rank in each repetition, and means over ranks.
  Spread slowest = {}, mean = {};
  double plan_ms = 0;    // what makes masks, lists and index, of the slowest rank
  double mib_moved = 0;  // by the rank that sends most
  double mib_whole = 0;  // by the one that would send most, if every hop carried all keys
  double imbalance = 1;  // tiles of the rank that visits most, over the mean
  double peak_mib = 0;   // of the process, all ranks together
  double error = 0;  // largest of outputs' or gradients', relative, at a length that fp64 checks

  // Errors of less come from other sums, or from rounding, not from another mask.
  double tolerance = 1e-4;

  bool is_wrong() const { return note.empty() && !(error < tolerance); }
  // Per second, on all ranks: 4 d for each visible pair and head forward, 10 d backward.
  double gflops(int heads, int head_dim) const;
};

// Milliseconds by [repetition] of the slowest rank and of the mean rank. by_rank:
// [rank][repetition].
void SetTimes(std::span<const std::vector<double>> by_rank, Cell* cell);

// Prints `more`, appends them, and returns how many of them are wrong or failed.
int AddCells(std::vector<Cell> more, int heads, int head_dim, std::vector<Cell>* cells);

// What all rows of a table say.
struct TableFacts {
  int heads = 0, head_dim = 0;
  std::string backend;  // that computed and, between ranks, carried
  std::string lengths;  // of documents (lengths/document_lengths.h)
  std::string hardware, commit;
};

// Writes NAME.csv and NAME.svg, a bar of each cell's gflops, into `folder`, which it makes where
// there is none; rows end with lengths, hardware, commit and the date. PERMISSION_DENIED where it
// cannot.
absl::Status WriteTable(const std::string& folder, const std::string& name,
                        std::span<const Cell> cells, const TableFacts& facts);

}  // namespace ringleader::bench
