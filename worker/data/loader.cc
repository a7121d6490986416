#include "worker/data/loader.h"

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
                                    uint64_t seed, uint64_t model_vocabulary) {
  ASSIGN_OR_RETURN(TokenFolder tokens, TokenFolder::Open(folder));
  if (tokens.tokens() < sequence_length + 1) {
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
  return Loader(std::move(tokens), sequence_length, seed);
}

Loader::Loader(TokenFolder folder, uint64_t sequence_length, uint64_t seed)
    : folder_(std::move(folder)),
      sequence_length_(sequence_length),
      // The label of a sequence's last token is the first token after it.
      sequences_((folder_.tokens() - 1) / sequence_length),
      seed_(seed) {}

LocalSequence Loader::Shuffled(uint64_t index, const kernels::ShardLayout& layout) const {
  const uint64_t epoch = index / sequences_;
  const uint64_t piece = Permute(index % sequences_, sequences_, Mix(seed_) ^ Mix(~epoch));
  const auto length = static_cast<uint64_t>(layout.tokens);
  const uint64_t part = Mix(Mix(seed_) ^ index) % (sequence_length_ / length);
  return Read(piece * sequence_length_ + part * length, layout);
}

LocalSequence Loader::InOrder(uint64_t index, const kernels::ShardLayout& layout) const {
  return Read(index * sequence_length_, layout);
}

LocalSequence Loader::Read(uint64_t start, const kernels::ShardLayout& layout) const {
  const int64_t n = layout.local_tokens();
  LocalSequence local;
  local.sequence_length = layout.tokens;
  local.tokens.reserve(n);
  local.positions.reserve(n);
  local.labels.reserve(n);
  local.answers.reserve(n);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t position = layout.Position(i);
    const uint32_t token = folder_.token(start + position);
    local.tokens.push_back(token);
    local.positions.push_back(position);
    const uint8_t mark = folder_.mark(start + position + 1);
    const bool predicted = token != folder_.manifest().separator && mark != kGivenMark;
    local.labels.push_back(predicted ? int64_t{folder_.token(start + position + 1)} : kIgnoreLabel);
    local.answers.push_back(predicted ? mark : kPlainMark);
  }
  local.document_firsts.push_back(0);
  for (const uint64_t first : folder_.DocumentStarts(start, start + layout.tokens)) {
    if (first > start) local.document_firsts.push_back(static_cast<int64_t>(first - start));
  }
  return local;
}

absl::StatusOr<std::vector<uint32_t>> SequencesOfGroup(
    uint32_t global_batch, uint32_t group, uint32_t groups,
    const std::vector<std::vector<uint32_t>>& assignment) {
  if (assignment.empty()) {
    std::vector<uint32_t> sequences;
    for (uint32_t s = group; s < global_batch; s += groups) sequences.push_back(s);
    return sequences;
  }
  std::vector<int> named(global_batch, 0);
  for (const auto& sequences : assignment) {
    for (const uint32_t s : sequences) {
      if (s >= global_batch) {
        return absl::InvalidArgumentError(absl::StrFormat(
            "the plan's micro-batches name sequence %d; a step has %d (training.global_batch)", s,
            global_batch));
      }
      ++named[s];
    }
  }
  for (uint32_t s = 0; s < global_batch; ++s) {
    if (named[s] != 1 || assignment.size() != groups) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "the plan's micro-batches are for %d groups (the job has %d) and name sequence %d %d "
          "times instead of once",
          assignment.size(), groups, s, named[s]));
    }
  }
  return assignment[group];
}

}  // namespace ringleader::data
