#include "worker/data/loader.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace ringleader::data {
namespace {

// SplitMix64 (Steele et al. 2014): the same numbers with every standard library, unlike
// std::shuffle.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// A pseudo-random permutation of [0, count): a Feistel network on the next even power of two,
// walked until it lands inside. Needs no memory, however many sequences there are.
uint64_t Permute(uint64_t i, uint64_t count, uint64_t key) {
  int half_bits = 1;
  while (half_bits < 31 && (uint64_t{1} << (2 * half_bits)) < count) ++half_bits;
  const uint64_t mask = (uint64_t{1} << half_bits) - 1;
  do {
    uint64_t left = i >> half_bits;
    uint64_t right = i & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      const uint64_t next = left ^ (Mix(key ^ Mix(right + (round << 60))) & mask);
      left = right;
      right = next;
    }
    i = left << half_bits | right;
  } while (i >= count);
  return i;
}

}  // namespace

absl::StatusOr<Loader> Loader::Open(const std::string& folder, uint64_t sequence_length,
                                    uint64_t seed, uint64_t model_vocabulary,
                                    const Batching& batching) {
  ASSIGN_OR_RETURN(TokenFolder tokens, TokenFolder::Open(folder));
  if (!batching.samples && tokens.tokens() < sequence_length + 1) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s holds %d tokens; one sequence of %d needs %d: pack more text or lower "
                        "data.sequence_length",
                        folder, tokens.tokens(), sequence_length, sequence_length + 1));
  }
  if (tokens.manifest().vocabulary > model_vocabulary) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s was packed with a vocabulary of %d, the model's vocab_size is %d: raise vocab_size or "
        "pack with the model's tokenizer",
        folder, tokens.manifest().vocabulary, model_vocabulary));
  }
  Loader loader(std::move(tokens), sequence_length, seed);
  loader.has_samples_ = batching.samples;
  if (batching.samples) {
    ASSIGN_OR_RETURN(loader.samples_,
                     IndexSamples(loader.folder_, folder, sequence_length, batching.overlong));
  }
  return loader;
}

Loader::Loader(TokenFolder folder, uint64_t sequence_length, uint64_t seed)
    : folder_(std::move(folder)), sequence_length_(sequence_length), seed_(seed) {}

uint64_t Loader::sequences() const {
  // The label of a sequence's last token is the first token after it.
  return has_samples_ ? samples_.samples.size() : (folder_.tokens() - 1) / sequence_length_;
}

Sample Loader::Shuffled(uint64_t index) const {
  const uint64_t epoch = index / sequences();
  return InOrder(Permute(index % sequences(), sequences(), Mix(seed_) ^ Mix(~epoch)));
}

Sample Loader::InOrder(uint64_t index) const {
  if (has_samples_) return samples_.samples[index];
  return {.start = index * sequence_length_, .tokens = sequence_length_};
}

std::vector<int64_t> Loader::DocumentFirsts(std::span<const Sample> samples, int64_t tokens) const {
  std::vector<int64_t> firsts;
  int64_t begin = 0;
  for (const Sample& sample : samples) {
    firsts.push_back(begin);
    if (!has_samples_) {
      for (const uint64_t first :
           folder_.DocumentStarts(sample.start, sample.start + sample.tokens)) {
        if (first > sample.start)
          firsts.push_back(begin + static_cast<int64_t>(first - sample.start));
      }
    }
    begin += static_cast<int64_t>(sample.tokens);
  }
  if (begin < tokens) firsts.push_back(begin);
  return firsts;
}

LocalSequence Loader::Read(std::span<const Sample> samples, const kernels::ShardLayout& layout,
                           const ring::HeadPlace& place) const {
  const int64_t held = layout.local_tokens() / place.ranks;
  std::vector<int64_t> positions(held);
  for (int64_t i = 0; i < held; ++i) positions[i] = layout.Position(place.member * held + i);
  return Read(samples, layout.tokens, positions);
}

LocalSequence Loader::Read(std::span<const Sample> samples, int64_t tokens,
                           std::span<const int64_t> positions) const {
  LocalSequence local;
  local.sequence_length = tokens;
  local.rotary_length = has_samples_ ? static_cast<int64_t>(sequence_length_) : tokens;
  local.tokens.reserve(positions.size());
  local.positions.reserve(positions.size());
  local.labels.reserve(positions.size());
  local.answers.reserve(positions.size());
  std::vector<int64_t> begins;  // of the samples, in the micro-batch
  for (const Sample& sample : samples) {
    begins.push_back(local.content);
    local.content += static_cast<int64_t>(sample.tokens);
  }
  for (const int64_t position : positions) {
    if (position >= local.content) {
      local.tokens.push_back(folder_.manifest().separator);
      local.positions.push_back(position - local.content);
      local.labels.push_back(kIgnoreLabel);
      local.answers.push_back(kPlainMark);
      continue;
    }
    const size_t number = std::ranges::upper_bound(begins, position) - begins.begin() - 1;
    const int64_t place = position - begins[number];  // in the sample
    const uint64_t at = samples[number].start + static_cast<uint64_t>(place);
    const uint32_t token = folder_.token(at);
    local.tokens.push_back(token);
    local.positions.push_back(place);
    const uint8_t mark = folder_.mark(at + 1);
    const bool predicted = token != folder_.manifest().separator && mark != kGivenMark;
    local.labels.push_back(predicted ? int64_t{folder_.token(at + 1)} : kIgnoreLabel);
    local.answers.push_back(predicted ? mark : kPlainMark);
  }
  local.document_firsts = DocumentFirsts(samples, tokens);
  return local;
}

}  // namespace ringleader::data
