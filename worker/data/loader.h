// Which tokens of the stream are trained together, in which order, and a rank's part of them with
// positions and labels.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/labels.h"
#include "ring/document_layout.h"
#include "ring/head_shares.h"
#include "ringleader/kernels/shard_layout.h"
#include "worker/data/samples.h"
#include "worker/data/token_folder.h"

namespace ringleader::data {

// The label of a token after which nothing is to be predicted: the first token of a document cannot
// be told from the one before it.
using ringleader::kIgnoreLabel;

// One rank's tokens of one micro-batch, in the rank's local order: [n].
struct LocalSequence {
  std::vector<int64_t> tokens;
  std::vector<int64_t> positions;  // in the sequence or, of samples, in the sample
  std::vector<int64_t> labels;     // the next token, or the one hidden here; or kIgnoreLabel
  // Which task's answer a label is, as index into Loader::tasks() + 1; 0: none's.
  std::vector<uint8_t> answers;
  int64_t sequence_length = 0;  // of the whole micro-batch, padding included
  // How long a sequence the rotary embedding is made for: the same for samples however they are
  // dealt.
  int64_t rotary_length = 0;
  // Positions of the whole micro-batch with which a document starts, ascending from 0: the document
  // that a packed sequence begins with may have begun before it. Padding is one of its own.
  std::vector<int64_t> document_firsts;
  // Where each one's prefix ends (Batching::prefixes); else empty.
  std::vector<int64_t> prefix_ends;
  int64_t content = 0;  // tokens before the padding
  // Where the documents lie (parallelism.layout: documents); null: as a ShardLayout has it.
  std::shared_ptr<const ring::DocumentLayout> layout;
};

// How documents become what is trained.
struct Batching {
  // Documents are samples, whole. Otherwise sequences are consecutive pieces of the token stream,
  // into which documents are packed without gaps.
  bool samples = false;
  Overlong overlong = Overlong::kRefuse;
  // Documents begin with a prefix, which the data marks.
  bool prefixes = false;
  // What is predicted: without a share the next token, else a token in `hidden_share` of the
  // places, drawn anew in every epoch, where the model reads `hidden_token` instead. Given tokens
  // are not hidden.
  double hidden_share = 0;
  uint32_t hidden_token = 0;
};

// Whether the data in `folder` has what `batching` asks for, and the model's vocabulary (0: not
// known) all of its tokens and the hidden one, which ends no documents. FAILED_PRECONDITION where
// there are no prefixes, else INVALID_ARGUMENT.
absl::Status CheckFits(const std::string& folder, const Manifest& manifest,
                       uint64_t model_vocabulary, const Batching& batching);

// INVALID_ARGUMENT where data was packed as bytes and the model in `model_folder` ("random": none)
// has a tokenizer, so that its ids mean something else.
absl::Status CheckTokenizer(const std::string& folder, const Manifest& manifest,
                            const std::string& model_folder);
// INVALID_ARGUMENT where the two were not packed alike, so that a loss on `eval` means nothing.
absl::Status CheckPackedAlike(const std::string& train_folder, const Manifest& train,
                              const std::string& eval_folder, const Manifest& eval);

// Immutable; safe to read from any thread.
class Loader {
 public:
  // FAILED_PRECONDITION says how many tokens there are if they do not make one sequence, or how
  // many documents are too long to be a sample; INVALID_ARGUMENT where one of the first 2^20 tokens
  // is the hidden one; or CheckFits' errors.
  static absl::StatusOr<Loader> Open(const std::string& folder, uint64_t sequence_length,
                                     uint64_t seed, uint64_t model_vocabulary,
                                     const Batching& batching = {});

  const TokenFolder& folder() const { return folder_; }
  // Whose answers the data marks; mostly none.
  const std::vector<std::string>& tasks() const { return folder_.manifest().tasks; }
  // Whole sequences, or samples, in the data.
  uint64_t sequences() const;
  // For people: how much of the data is trained on, and what is not.
  std::string Summary() const;
  // Without samples: of the stream's end, less than a sequence, which no epoch has.
  uint64_t tokens_left_over() const;
  // What there was to be turned into samples; zeros without.
  const SampleCounts& counts() const { return samples_.counts; }

  // Training order: number `index` of an endless stream of epochs, each a permutation of all
  // sequences that only the seed and the epoch decide.
  Sample Shuffled(uint64_t index) const;
  // Evaluation order: as they lie in the data. index < sequences().
  Sample InOrder(uint64_t index) const;

  // A rank's part of one micro-batch of `samples` one after the other, then padding up to `tokens`,
  // which is at least their sum: the tokens at `positions` of it.
  LocalSequence Read(std::span<const Sample> samples, int64_t tokens,
                     std::span<const int64_t> positions) const;
  // Of the tokens that the layout's rank has, `place`'s part, in their order.
  LocalSequence Read(std::span<const Sample> samples, const kernels::ShardLayout& layout,
                     const ring::HeadPlace& place = {}) const;
  // LocalSequence::document_firsts of a micro-batch of `tokens`.
  std::vector<int64_t> DocumentFirsts(std::span<const Sample> samples, int64_t tokens) const;

 private:
  Loader(TokenFolder folder, uint64_t sequence_length, uint64_t seed, const Batching& batching);
  // LocalSequence::prefix_ends.
  std::vector<int64_t> PrefixEnds(std::span<const Sample> samples, const LocalSequence& of) const;
  // A place of a sample: what the model reads there, what it is to say, and whose answer that is.
  struct Place {
    int64_t token = 0, label = kIgnoreLabel;
    uint8_t answer = kPlainMark;
  };
  Place NextTokenAt(uint64_t at) const;
  Place HiddenAt(uint64_t at, uint64_t epoch) const;

  TokenFolder folder_;
  uint64_t sequence_length_;
  uint64_t seed_;
  Batching batching_;
  SampleIndex samples_;
};

}  // namespace ringleader::data
