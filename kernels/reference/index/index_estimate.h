// Steps 1 to 3 of ringleader/kernels/index.h on the CPU: what the estimate queries of each head
// attend to, as fixed-point masses of columns and block diagonals.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/reference/math/engine.h"
#include "ringleader/kernels/index.h"

namespace ringleader::kernels::reference {

// Keeps the logits between the steps: heads * E * n floats in the engine's shared scratch memory,
// so that no other pass may run in between. The buffers of the arguments must outlive it; between
// the steps the caller reduces them over ranks.
class IndexEstimate {
 public:
  // INVALID_ARGUMENT names the argument.
  static absl::StatusOr<IndexEstimate> Create(Engine& engine, const IndexEstimateArgs<float>& args);

  void RowMax();  // step 1, sets row_max
  void RowSum();  // step 2, sets row_sum
  void Mass();    // step 3, sets column_mass and diagonal_mass

  // Share of the attention of every `stride`-th estimate query that falls on this rank's keys and
  // on a selected diagonal or column, after step 2. kept: [heads], summed over those queries.
  // diagonals: [heads, diagonal_words]; columns: [heads, n], non-zero where selected.
  void KeptMass(int stride, const uint64_t* diagonals, int diagonal_words, const char* columns,
                double* kept);

 private:
  IndexEstimate(Engine& engine, const IndexEstimateArgs<float>& args);

  int64_t KeyRuns() const;
  int QueryRuns() const;
  // [64, 64] logits, base 2, of a run of queries and a run of keys.
  float* Logits(int head, int query_run, int64_t key_run);
  void ShiftOf(int head, int query_run, bool with_sum, float* shift) const;
  // body(head, query run, rows of it, key run, worker), over all, in parallel over key runs.
  template <typename Body>
  void ForRuns(Body body);

  Engine& engine_;
  IndexEstimateArgs<float> args_;
  float* const logits_;  // [heads, query runs, key runs, 64, 64]
};

}  // namespace ringleader::kernels::reference
