// What ringleader-bench is asked for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/longca/lengths/document_lengths.h"
#include "bench/longca/pattern_choice.h"
#include "kernels/masks/masks.h"
#include "patterns/attention_options.h"

namespace ringleader::bench {

struct BenchOptions {
  std::string folder = ".";
  std::vector<int64_t> tokens;       // of sequences, or of what each rank has of them
  bool are_tokens_per_rank = false;  // which it is
  std::vector<double> densities;     // percent
  std::vector<patterns::Pattern> patterns;
  std::vector<int> ranks;
  std::vector<kernels::MaskKind> masks;
  std::string lengths_file;  // where `lengths` are from; empty: ProLong-like
  DocumentLengths lengths;
  std::string commit = "unknown";  // that tables name
  int threads = 1;
  int repetitions = 1;

  // Of the sequence that so many ranks share, for one of `tokens`: a multiple of what `tile` tokens
  // in two stripes a rank take.
  int64_t SharedTokens(int64_t tokens, int ranks, int64_t tile) const {
    if (are_tokens_per_rank) tokens *= ranks;
    const int64_t multiple = int64_t{2} * ranks * tile;
    return (tokens + multiple - 1) / multiple * multiple;
  }

  // All that a mask shows, and each pattern at each density.
  std::vector<PatternChoice> choices() const {
    std::vector<PatternChoice> choices = {{}};
    for (const patterns::Pattern pattern : patterns) {
      for (const double percent : densities) choices.push_back({pattern, percent / 100});
    }
    return choices;
  }
};

}  // namespace ringleader::bench
