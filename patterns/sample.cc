#include "patterns/sample.h"

#include <algorithm>

#include "patterns/pattern.h"

namespace ringleader::patterns {

ring::HeadPattern Band(int64_t blocks, int64_t width) {
  ring::HeadPattern head;
  head.diagonals.assign(blocks, 0);
  std::fill_n(head.diagonals.begin(), std::min(blocks, width), 1);
  return head;
}

std::vector<ring::HeadPattern> SampleLayer(const AttentionOptions& options, bool dense,
                                           int64_t blocks, int heads, const PatternHints& hints,
                                           uint64_t seed) {
  const PatternDefinition& definition = DefinitionOf(dense ? Pattern::kDense : options.pattern);
  if (definition.is_known_before_data()) heads = 1;
  Random random(seed);
  std::vector<ring::HeadPattern> sample;
  sample.reserve(heads);
  for (int h = 0; h < heads; ++h) {
    sample.push_back(definition.sample(options, blocks, hints, &random));
  }
  return sample;
}

}  // namespace ringleader::patterns
