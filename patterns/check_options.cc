#include "patterns/check_options.h"

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "ringleader/kernels/index.h"

namespace ringleader::patterns {

using kernels::LayoutKind;

namespace {

absl::Status Invalid(const std::string& message) {
  return absl::InvalidArgumentError(message);
}

absl::Status CheckPattern(const AttentionOptions& options) {
  switch (options.pattern) {
    case Pattern::kDense:
      return absl::OkStatus();
    case Pattern::kSlidingWindow:
      if (options.window < 1) {
        return Invalid(absl::StrFormat(
            "attention.window is %d; a sliding window needs at least 1 token", options.window));
      }
      return absl::OkStatus();
    case Pattern::kVerticalSlash:
      if (options.estimate_queries < 1 || options.estimate_queries > kernels::kMaxEstimateQueries) {
        return Invalid(absl::StrFormat("attention.estimate_queries is %d; allowed are 1 to %d",
                                       options.estimate_queries, kernels::kMaxEstimateQueries));
      }
      if (options.sink_tokens < 0 || options.local_blocks < 0) {
        return Invalid("attention.sink_tokens and attention.local_blocks must not be negative");
      }
      return absl::OkStatus();
    case Pattern::kBlockTopK:
      if (options.block_size < options.tile || options.block_size % options.tile != 0) {
        return Invalid(
            absl::StrFormat("attention.block_size is %d; it must be a multiple of attention.tile "
                            "(%d)",
                            options.block_size, options.tile));
      }
      if (options.topk_blocks < 0) return Invalid("attention.topk_blocks must not be negative");
      return absl::OkStatus();
  }
  return Invalid("attention.pattern is unknown");
}

}  // namespace

absl::Status CheckBudget(const LayerBudget& budget) {
  for (const double mass : {budget.vertical_mass, budget.slash_mass}) {
    if (!(mass > 0.0 && mass <= 1.0)) {
      return Invalid(absl::StrFormat(
          "attention.vertical_mass and slash_mass must lie in (0, 1]; got %g", mass));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckOptions(const AttentionOptions& options, int ranks) {
  if (options.tile != 64 && options.tile != 128) {
    return Invalid(absl::StrFormat("attention.tile is %d; allowed are 64 and 128", options.tile));
  }
  if (options.ring.inner * options.ring.outer != ranks) {
    return Invalid(absl::StrFormat("a ring of %d x %d does not fit %d ranks", options.ring.outer,
                                   options.ring.inner, ranks));
  }
  if (options.layout == LayoutKind::kStriped &&
      (options.stripe < 1 || options.stripe % options.tile != 0)) {
    return Invalid(
        absl::StrFormat("parallelism.stripe is %d tokens; it must be a multiple of attention.tile "
                        "(%d)",
                        options.stripe, options.tile));
  }
  RETURN_IF_ERROR(CheckBudget(options.budget));
  return CheckPattern(options);
}

absl::Status CheckLength(const AttentionOptions& options, int ranks, int64_t local_tokens) {
  if (ranks == 1) return absl::OkStatus();
  const int64_t tokens = local_tokens * ranks;
  // Dense shards of one run may have any length; all else needs whole tiles.
  int64_t multiple = 1;
  switch (options.layout) {
    case LayoutKind::kContiguous:
      multiple = options.pattern == Pattern::kDense || options.pattern == Pattern::kSlidingWindow
                     ? ranks
                     : int64_t{ranks} * options.tile;
      break;
    case LayoutKind::kZigzag:
      multiple = int64_t{2} * ranks * options.tile;
      break;
    case LayoutKind::kStriped:
      multiple = int64_t{ranks} * options.stripe;
      break;
  }
  if (tokens % multiple == 0) return absl::OkStatus();
  return Invalid(
      absl::StrFormat("data.sequence_length of %d tokens on %d ranks must be a multiple of %d in "
                      "this layout",
                      tokens, ranks, multiple));
}

}  // namespace ringleader::patterns
