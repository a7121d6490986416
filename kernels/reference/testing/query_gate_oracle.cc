#include "kernels/reference/testing/query_gate_oracle.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"

namespace ringleader::kernels::reference::testing {
namespace {

bool HasBit(const std::vector<uint32_t>& words, int64_t row_words, int64_t row, int64_t bit) {
  return (words.at(row * row_words + bit / 32) >> bit % 32 & 1) != 0;
}

int64_t BlocksOf(const QueryGateStep& step, const ShardLayout& layout) {
  return (layout.tokens + step.block_size - 1) / step.block_size;
}

// [blocks, d]: of a block's keys of the document of its last one.
std::vector<double> Means(const TokenMajor<const float>& k, int head, int block_size,
                          int64_t blocks, const std::vector<int32_t>& starts) {
  std::vector<double> means(blocks * k.head_dim, 0.0);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t end = std::min(k.tokens, (block + 1) * block_size);
    int64_t first = block * block_size;
    while (!starts.empty() && starts[first] != starts[end - 1]) ++first;
    for (int64_t i = first; i < end; ++i) {
      for (int x = 0; x < k.head_dim; ++x) {
        means[block * k.head_dim + x] +=
            double{k.data[i * k.token_stride + head * k.head_stride + x]} /
            static_cast<double>(end - first);
      }
    }
  }
  return means;
}

}  // namespace

std::string QueryGateComplaint(const TokenMajor<const float>& q, const TokenMajor<const float>& k,
                               const QueryGateStep& step, const std::vector<int32_t>& starts,
                               const ShardLayout& layout, const std::vector<uint32_t>& queries,
                               double tolerance) {
  const int64_t n = layout.local_tokens(), blocks = BlocksOf(step, layout), words = (n + 31) / 32;
  for (int head = 0; head < q.heads; ++head) {
    const std::vector<double> means =
        Means(k, head / (q.heads / k.heads), step.block_size, blocks, starts);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t position = layout.Position(i), own = position / step.block_size;
      const int64_t first = starts.empty() ? 0 : starts[position] / step.block_size;
      const int64_t seen = own - first + 1;
      int64_t keep = step.topk_blocks;
      if (step.density > 0)
        keep = static_cast<int64_t>(double{step.density} * static_cast<double>(seen));
      const int64_t others = std::max<int64_t>(keep - 1, 0);
      const int32_t halves = step.head_halves == nullptr ? 2 : step.head_halves[head];
      keep = others + 1;
      if (halves == 1) keep -= others / 2;
      if (halves == 3) keep += others / 2;
      keep = std::min(keep, seen);
      int64_t kept = 0;
      double least = INFINITY, best_left = -INFINITY;
      const auto where = [&](const char* what) {
        return absl::StrFormat("head %d, query at %d: %s", head, position, what);
      };
      for (int64_t block = 0; block < blocks; ++block) {
        const bool chosen = HasBit(queries, words, head * blocks + block, i);
        if (block < first || block > own) {
          if (chosen) return where("keeps a block that it does not see");
          continue;
        }
        kept += chosen ? 1 : 0;
        if (block == own) {
          if (!chosen) return where("leaves its own block");
          continue;
        }
        double score = 0.0;
        for (int x = 0; x < q.head_dim; ++x) {
          score += double{q.data[position * q.token_stride + head * q.head_stride + x]} *
                   means[block * q.head_dim + x];
        }
        (chosen ? least : best_left) = chosen ? std::min(least, score) : std::max(best_left, score);
      }
      if (kept != keep) return where("keeps another number of blocks");
      if (least < best_left - tolerance) return where("leaves a block of a higher score");
    }
  }
  return "";
}

std::string ChosenByTileComplaint(const QueryGateStep& step, int heads, const ShardLayout& layout,
                                  const std::vector<uint32_t>& queries,
                                  const std::vector<uint32_t>& chosen) {
  const int64_t n = layout.local_tokens(), blocks = BlocksOf(step, layout);
  const int64_t tiles = (n + step.tile - 1) / step.tile;
  for (int64_t row = 0; row < heads * tiles; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      bool any = false;
      for (int64_t i = row % tiles * step.tile; i < std::min(n, (row % tiles + 1) * step.tile);
           ++i) {
        any |= HasBit(queries, (n + 31) / 32, row / tiles * blocks + block, i);
      }
      if (any == HasBit(chosen, (blocks + 31) / 32, row, block)) continue;
      return absl::StrFormat("row %d, block %d: a query of the tile keeps it %d", row, block, any);
    }
  }
  return "";
}

}  // namespace ringleader::kernels::reference::testing
