// What each query of a sequence sees, for tests: by position, and as the steps of an index take it.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "ringleader/kernels/seen_keys.h"

namespace ringleader::kernels::reference::testing {

// A rank's part. Outlives what it hands out.
struct RankSight {
  std::vector<int32_t> document_starts;
  std::vector<KeyIntervals> intervals;
  std::vector<int32_t> key_starts;  // of the sequence, beside document_starts
  int64_t content = 0;              // of the sequence: Sight::content

  SeenKeys seen() const {
    return {.document_starts = document_starts.empty() ? nullptr : document_starts.data(),
            .intervals = intervals.empty() ? nullptr : intervals.data()};
  }
  MeanKeys counted() const {
    return {.starts = key_starts.empty() ? nullptr : key_starts.data(), .content = content};
  }
};

class Sight {
 public:
  enum class Mask { kCausal, kFull, kPrefix, kBlocks };
  static constexpr Mask kMasks[] = {Mask::kCausal, Mask::kFull, Mask::kPrefix, Mask::kBlocks};
  static constexpr std::string_view kNames[] = {"causal", "full", "prefix", "blocks"};

  // `firsts`: of the documents, which are apart; empty: one. kPrefix: the first third of each
  // document; kBlocks: blocks of 100 tokens of each.
  Sight(Mask mask, int64_t tokens, std::vector<int64_t> firsts = {});

  // The keys that the query at a position sees: [Begin, End).
  int64_t Begin(int64_t position) const { return rows_[position].begin; }
  int64_t End(int64_t position) const { return rows_[position].end; }
  bool Sees(int64_t query, int64_t key) const { return Begin(query) <= key && key < End(query); }
  // Where padding begins: with the last of several documents.
  int64_t content() const { return content_; }
  // Whether one of the queries [first, last] sees the block of `size` keys.
  bool Meets(int64_t first, int64_t last, int64_t block, int64_t size) const;

  RankSight Of(const ShardLayout& layout) const;

 private:
  Mask mask_;
  bool is_packed_;
  int64_t content_;
  std::vector<KeyIntervals> rows_;  // by position
};

}  // namespace ringleader::kernels::reference::testing
