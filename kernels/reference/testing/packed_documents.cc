#include "kernels/reference/testing/packed_documents.h"

#include <algorithm>

#include "ringleader/kernels/seen_keys.h"

namespace ringleader::kernels::reference::testing {

std::vector<int32_t> DocumentStarts(int64_t tokens, const std::vector<int64_t>& firsts) {
  std::vector<int32_t> starts(tokens);
  size_t document = 0;
  for (int64_t i = 0; i < tokens; ++i) {
    if (document + 1 < firsts.size() && firsts[document + 1] == i) ++document;
    starts[i] = static_cast<int32_t>(firsts[document]);
  }
  return starts;
}

std::vector<int64_t> RandomDocuments(int64_t tokens, int tile, std::mt19937& random) {
  std::vector<int64_t> firsts;
  for (int64_t first = 0; first < tokens;) {
    firsts.push_back(first);
    switch (random() % 5) {
      case 0:
        first += 1;
        break;
      case 1:
        first = (first / tile + 1 + random() % 2) * tile;
        break;
      case 2:
        first += 3 * tile + random() % (2 * tile);
        break;
      default:
        first += 1 + random() % (tile / 2);
    }
  }
  return firsts;
}

std::vector<int32_t> KeyStarts(const std::vector<int32_t>& starts) {
  std::vector<int32_t> of_keys;
  const int64_t tokens = std::ssize(starts);
  for (int64_t first = 0; first < tokens; first += MeanKeys::kTokens) {
    of_keys.push_back(starts[std::min(first + MeanKeys::kTokens, tokens) - 1]);
  }
  return of_keys;
}

std::vector<int32_t> ShardStarts(const std::vector<int32_t>& starts, const ShardLayout& layout) {
  std::vector<int32_t> result(layout.local_tokens());
  for (int64_t i = 0; i < layout.local_tokens(); ++i) result[i] = starts[layout.Position(i)];
  return result;
}

}  // namespace ringleader::kernels::reference::testing
