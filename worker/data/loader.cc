#include "worker/data/loader.h"

#include <algorithm>
#include <filesystem>

#include "absl/strings/str_format.h"
#include "base/numbers/split_mix.h"
#include "base/status_macros.h"

namespace ringleader::data {
namespace {

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
      const uint64_t next = left ^ (SplitMix64(key ^ SplitMix64(right + (round << 60))) & mask);
      left = right;
      right = next;
    }
    i = left << half_bits | right;
  } while (i >= count);
  return i;
}

}  // namespace

namespace {

// A token that stands in the data and for what is hidden trains a model that cannot tell the two.
// Looks at as many tokens as are read in a moment, however long the data is.
absl::Status CheckIsNoToken(const std::string& folder, const TokenFolder& tokens, uint32_t hidden) {
  constexpr uint64_t kLookedAt = 1 << 20;
  for (uint64_t i = 0; i < std::min(tokens.tokens(), kLookedAt); ++i) {
    if (tokens.token(i) != hidden) continue;
    return absl::InvalidArgumentError(absl::StrFormat(
        "data.hidden_token: %d is token %d of %s: give a token id that the data does not hold",
        hidden, i, folder));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckFits(const std::string& folder, const Manifest& manifest,
                       uint64_t model_vocabulary, const Batching& batching) {
  if (model_vocabulary > 0 && manifest.vocabulary > model_vocabulary) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s was packed with a vocabulary of %d, the model's vocab_size is %d: raise vocab_size or "
        "pack with the model's tokenizer",
        folder, manifest.vocabulary, model_vocabulary));
  }
  if (batching.prefixes && !manifest.has_marks()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s says of no document where its prefix ends, which attention.mask: "
                        "prefix_lm asks for: pack it with `ringctl data pack --prefix-end` or with "
                        "marks, or give another mask",
                        folder));
  }
  if (model_vocabulary > 0 && batching.hidden_share > 0 &&
      batching.hidden_token >= model_vocabulary) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "data.hidden_token: %d is outside of the model's vocabulary of %d: raise vocab_size, or "
        "give a token id below it that the data does not hold",
        batching.hidden_token, model_vocabulary));
  }
  if (batching.hidden_share > 0 && batching.hidden_token == manifest.separator) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "data.hidden_token: %d ends documents in %s: give a token id that the data does not hold",
        batching.hidden_token, folder));
  }
  return absl::OkStatus();
}

absl::Status CheckTokenizer(const std::string& folder, const Manifest& manifest,
                            const std::string& model_folder) {
  if (manifest.tokenizer != "bytes") return absl::OkStatus();
  for (const char* file : {"tokenizer.json", "tokenizer.model"}) {
    std::error_code ignored;
    if (!std::filesystem::exists(std::filesystem::path(model_folder) / file, ignored)) continue;
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s was packed as bytes, and the model in %s has a tokenizer (%s), to which these ids mean "
        "something else: pack its token ids (ringctl data pack --format)",
        folder, model_folder, file));
  }
  return absl::OkStatus();
}

absl::Status CheckPackedAlike(const std::string& train_folder, const Manifest& train,
                              const std::string& eval_folder, const Manifest& eval) {
  // Who packs token ids need not name their tokenizer.
  const bool is_same =
      train.tokenizer == eval.tokenizer || train.tokenizer.empty() || eval.tokenizer.empty();
  if (is_same && train.separator == eval.separator) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s was packed with tokenizer \"%s\" and separator %d, and %s with \"%s\" and %d: pack both "
      "alike",
      train_folder, train.tokenizer, train.separator, eval_folder, eval.tokenizer, eval.separator));
}

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
  RETURN_IF_ERROR(CheckFits(folder, tokens.manifest(), model_vocabulary, batching));
  if (batching.hidden_share > 0) {
    RETURN_IF_ERROR(CheckIsNoToken(folder, tokens, batching.hidden_token));
  }
  Loader loader(std::move(tokens), sequence_length, seed, batching);
  if (batching.samples) {
    ASSIGN_OR_RETURN(loader.samples_,
                     IndexSamples(loader.folder_, folder, sequence_length, batching.overlong));
  }
  return loader;
}

Loader::Loader(TokenFolder folder, uint64_t sequence_length, uint64_t seed,
               const Batching& batching)
    : folder_(std::move(folder)),
      sequence_length_(sequence_length),
      seed_(seed),
      batching_(batching) {}

uint64_t Loader::sequences() const {
  // The label of a sequence's last token is the first token after it.
  return batching_.samples ? samples_.samples.size() : (folder_.tokens() - 1) / sequence_length_;
}

std::string Loader::Summary() const {
  if (!batching_.samples) {
    return absl::StrFormat("%d sequences of %d tokens; the last %d tokens are in none", sequences(),
                           sequence_length_, tokens_left_over());
  }
  return absl::StrFormat(
      "%d samples of %d documents; %d documents (%d tokens) of more than %d tokens %s", sequences(),
      counts().documents, counts().overlong, counts().overlong_tokens, sequence_length_,
      batching_.overlong == Overlong::kDrop ? "dropped" : "split");
}

uint64_t Loader::tokens_left_over() const {
  return folder_.tokens() - 1 - sequences() * sequence_length_;
}

Sample Loader::Shuffled(uint64_t index) const {
  const uint64_t epoch = index / sequences();
  Sample sample =
      InOrder(Permute(index % sequences(), sequences(), SplitMix64(seed_) ^ SplitMix64(~epoch)));
  sample.epoch = epoch + 1;
  return sample;
}

Sample Loader::InOrder(uint64_t index) const {
  if (batching_.samples) return samples_.samples[index];
  return {.start = index * sequence_length_, .tokens = sequence_length_};
}

std::vector<int64_t> Loader::DocumentFirsts(std::span<const Sample> samples, int64_t tokens) const {
  std::vector<int64_t> firsts;
  int64_t begin = 0;
  for (const Sample& sample : samples) {
    firsts.push_back(begin);
    if (!batching_.samples) {
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

std::vector<int64_t> Loader::PrefixEnds(std::span<const Sample> samples,
                                        const LocalSequence& of) const {
  std::vector<int64_t> ends;
  size_t number = 0;
  int64_t begin = 0;  // of the sample, in the micro-batch
  for (size_t i = 0; i < of.document_firsts.size(); ++i) {
    const int64_t first = of.document_firsts[i];
    const int64_t behind =
        i + 1 < of.document_firsts.size() ? of.document_firsts[i + 1] : of.sequence_length;
    while (number < samples.size() && first >= begin + static_cast<int64_t>(samples[number].tokens))
      begin += static_cast<int64_t>(samples[number++].tokens);
    if (number == samples.size()) {  // padding
      ends.push_back(first);
      continue;
    }
    const uint64_t at = samples[number].start + static_cast<uint64_t>(first - begin);
    const uint64_t end = folder_.PrefixEnd(at, at + static_cast<uint64_t>(behind - first));
    ends.push_back(first + static_cast<int64_t>(end - at));
  }
  return ends;
}

Loader::Place Loader::NextTokenAt(uint64_t at) const {
  Place place = {.token = folder_.token(at)};
  const uint8_t mark = folder_.mark(at + 1);
  if (place.token == folder_.manifest().separator || mark == kGivenMark) return place;
  place.label = folder_.token(at + 1);
  place.answer = mark;
  return place;
}

Loader::Place Loader::HiddenAt(uint64_t at, uint64_t epoch) const {
  Place place = {.token = folder_.token(at)};
  const uint8_t mark = folder_.mark(at);
  const uint64_t draw = SplitMix64(SplitMix64(seed_ ^ SplitMix64(epoch)) ^ at);
  const bool is_hidden = static_cast<double>(draw >> 11) * 0x1p-53 < batching_.hidden_share;
  if (!is_hidden || mark == kGivenMark) return place;
  return {.token = batching_.hidden_token, .label = place.token, .answer = mark};
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
  local.rotary_length = batching_.samples ? static_cast<int64_t>(sequence_length_) : tokens;
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
    const Place here =
        batching_.hidden_share > 0 ? HiddenAt(at, samples[number].epoch) : NextTokenAt(at);
    local.tokens.push_back(here.token);
    local.positions.push_back(place);
    local.labels.push_back(here.label);
    local.answers.push_back(here.answer);
  }
  local.document_firsts = DocumentFirsts(samples, tokens);
  if (batching_.prefixes) local.prefix_ends = PrefixEnds(samples, local);
  return local;
}

}  // namespace ringleader::data
