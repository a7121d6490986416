#include "patterns/sample.h"

#include <algorithm>
#include <cstdlib>

#include "patterns/pattern.h"

namespace ringleader::patterns {

ring::HeadPattern Band(int64_t blocks, int64_t width) {
  ring::HeadPattern head;
  head.diagonals.assign(blocks, 0);
  std::fill_n(head.diagonals.begin(), std::min(blocks, width), 1);
  return head;
}

ring::HeadPattern Visible(const AttentionOptions& options, int64_t blocks, int64_t width) {
  ring::HeadPattern head = Band(blocks, width);
  width = std::min(blocks, width);
  switch (options.mask) {
    case Mask::kCausal:
    case Mask::kPrefixLm:
      break;
    case Mask::kFull:
      head.ahead.assign(width, 1.0);
      break;
    case Mask::kBlockCausal: {
      // Of a mask's block of `span` tiles all but the last `delta` see the tile that lies `delta`
      // ahead; the sequence's last blocks - delta have none to see.
      const int64_t span = std::min(blocks, (options.mask_block + options.tile - 1) / options.tile);
      for (int64_t delta = 0; delta < std::min(span, width); ++delta) {
        head.ahead.push_back(static_cast<double>(blocks * (span - delta)) /
                             static_cast<double>(span * (blocks - delta)));
      }
      break;
    }
  }
  if (!head.ahead.empty()) head.ahead[0] = 0;  // the main diagonal is in the band
  return head;
}

int64_t SeenTiles(const AttentionOptions& options, int64_t blocks, int64_t q) {
  switch (options.mask) {
    case Mask::kCausal:
    case Mask::kPrefixLm:
      return q + 1;
    case Mask::kFull:
      return blocks;
    case Mask::kBlockCausal: {
      const int64_t last = (q + 1) * options.tile - 1, block = options.mask_block;
      const int64_t end = (last / block + 1) * block;
      return std::min(blocks, (end + options.tile - 1) / options.tile);
    }
  }
  std::abort();
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
