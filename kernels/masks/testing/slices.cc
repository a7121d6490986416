#include "kernels/masks/testing/slices.h"

#include <algorithm>

namespace ringleader::kernels::testing {

bool Slice::Shows(int64_t query, int64_t key) const {
  if (query < query_begin || query >= query_end || key < key_begin || key >= key_end) return false;
  const bool causal = key_end - key >= query_end - query,
             inverse = key - key_begin >= query - query_begin;
  switch (type) {
    case SliceType::kFull:
      return true;
    case SliceType::kCausal:
      return causal;
    case SliceType::kInverse:
      return inverse;
    case SliceType::kBicausal:
      return causal && inverse;
  }
  return false;
}

int64_t Slice::Area() const {
  const int64_t queries = query_end - query_begin, keys = key_end - key_begin;
  // A triangle's row that is r from its longest has keys - r.
  const auto triangle = [&] {
    const int64_t rows = std::min(queries, keys);
    return rows * keys - rows * (rows - 1) / 2;
  };
  switch (type) {
    case SliceType::kFull:
      return queries * keys;
    case SliceType::kCausal:
    case SliceType::kInverse:
      return triangle();
    case SliceType::kBicausal:
      return queries * std::max<int64_t>(keys - queries + 1, 0);
  }
  return 0;
}

namespace {

using enum SliceType;

// Queries [begin, end) of a band |i - j| < window within keys [0, tokens), without those at keys
// below `low`.
void AddBand(int64_t begin, int64_t end, int64_t tokens, int64_t window, int64_t low, bool ahead,
             std::vector<Slice>& slices) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t first = std::max(i - window + 1, low);
    const int64_t last = ahead ? std::min(i + window, tokens) : i + 1;
    if (first < last) slices.push_back({i, i + 1, first, last, kFull});
  }
}

}  // namespace

std::vector<Slice> SlicesOf(const Mask& mask, int64_t tokens, std::span<const int32_t> documents) {
  const int64_t n = tokens, w = mask.window;
  std::vector<Slice> slices;
  std::vector<std::pair<int64_t, int64_t>> ranges;  // of documents
  for (size_t d = 0; d < documents.size(); ++d) {
    ranges.emplace_back(documents[d], d + 1 < documents.size() ? documents[d + 1] : n);
  }
  const auto each_document = [&](const auto& add) {
    for (const auto& [first, end] : ranges) add(first, end);
  };
  switch (mask.kind) {
    case MaskKind::kFull:
      return {{0, n, 0, n, kFull}};
    case MaskKind::kCausal:
      return {{0, n, 0, n, kCausal}};
    case MaskKind::kFullWindow:
      if (2 * w > n) {
        AddBand(0, n, n, w, 0, true, slices);
        return slices;
      }
      // The corners, where the sequence cuts the band, and its middle.
      return {{0, w - 1, 0, 2 * w - 2, kCausal},
              {w - 1, n - w + 1, 0, n, kBicausal},
              {n - w + 1, n, n - 2 * w + 2, n, kInverse}};
    case MaskKind::kCausalWindow:
      if (w > n) return {{0, n, 0, n, kCausal}};
      return {{0, w - 1, 0, w - 1, kCausal}, {w - 1, n, 0, n, kBicausal}};
    case MaskKind::kFullDocuments:
      each_document([&](int64_t a, int64_t b) { slices.push_back({a, b, a, b, kFull}); });
      return slices;
    case MaskKind::kCausalDocuments:
      each_document([&](int64_t a, int64_t b) { slices.push_back({a, b, a, b, kCausal}); });
      return slices;
    case MaskKind::kSharedQuestion: {
      const int64_t first_answer_end = ranges.size() > 1 ? ranges[1].second : n;
      slices.push_back({0, first_answer_end, 0, first_answer_end, kCausal});
      for (size_t d = 2; d < ranges.size(); ++d) {
        const auto& [a, b] = ranges[d];
        slices.push_back({a, b, 0, ranges[0].second, kFull});
        slices.push_back({a, b, a, b, kCausal});
      }
      return slices;
    }
    case MaskKind::kCausalBlockwise:
      for (size_t d = 0; d + 1 < ranges.size(); ++d) {
        const auto& [a, b] = ranges[d];
        slices.push_back({a, b, a, b, kCausal});
      }
      slices.push_back({ranges.back().first, n, 0, n, kCausal});
      return slices;
    case MaskKind::kGlobalSliding:
      slices.push_back({0, std::min(w, n), 0, n, kFull});
      if (w < n) slices.push_back({w, n, 0, w, kFull});
      AddBand(w, n, n, w, w, true, slices);
      return slices;
    case MaskKind::kPrefixCausal: {
      const int64_t p = std::min<int64_t>(mask.prefix, n);
      if (p > 0) slices.push_back({0, p, 0, p, kFull});
      if (p < n) slices.push_back({p, n, 0, n, kCausal});
      return slices;
    }
    case MaskKind::kPrefixDocuments:
      each_document([&](int64_t a, int64_t b) {
        const int64_t p = std::min<int64_t>(a + mask.prefix, b);
        if (p > a) slices.push_back({a, p, a, p, kFull});
        if (p < b) slices.push_back({p, b, a, b, kCausal});
      });
      return slices;
    case MaskKind::kBlockCausalDocuments:
      each_document([&](int64_t a, int64_t b) {
        for (int64_t block = a; block < b; block += mask.block) {
          const int64_t end = std::min(block + mask.block, b);
          slices.push_back({block, end, a, end, kFull});
        }
      });
      return slices;
  }
  return slices;
}

std::vector<int> CountPairs(const std::vector<Slice>& slices, int64_t tokens) {
  std::vector<int> counts(tokens * tokens, 0);
  for (const Slice& slice : slices) {
    for (int64_t i = slice.query_begin; i < slice.query_end; ++i) {
      for (int64_t j = slice.key_begin; j < slice.key_end; ++j) {
        if (slice.Shows(i, j)) ++counts[i * tokens + j];
      }
    }
  }
  return counts;
}

}  // namespace ringleader::kernels::testing
