// Deals sequences to ranks: which tokens of the stream a rank trains on in a step, with their
// positions and labels.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/labels.h"
#include "ringleader/kernels/shard_layout.h"
#include "worker/data/token_folder.h"

namespace ringleader::data {

// The label of a token after which nothing is to be predicted: the first token of a document cannot
// be told from the one before it.
using ringleader::kIgnoreLabel;

// One rank's tokens of one sequence, in the rank's local order: [n], n = layout.local_tokens().
struct LocalSequence {
  std::vector<int64_t> tokens;
  std::vector<int64_t> positions;  // in the sequence
  std::vector<int64_t> labels;     // the next token of the sequence, or kIgnoreLabel
  // Which task's answer a label is, as index into Loader::tasks() + 1; 0: none's.
  std::vector<uint8_t> answers;
  int64_t sequence_length = 0;  // of the whole sequence
  // Positions of the whole sequence with which a document starts, ascending from 0: the document
  // that the sequence begins with may have begun before it.
  std::vector<int64_t> document_firsts;
};

// Sequences are consecutive pieces of the token stream; documents are packed into them without
// gaps, whether attention is masked between them or not. Immutable; safe to read from any thread.
class Loader {
 public:
  // FAILED_PRECONDITION says how many tokens there are if they do not make one sequence;
  // INVALID_ARGUMENT if the model's vocabulary is smaller than the data's.
  static absl::StatusOr<Loader> Open(const std::string& folder, uint64_t sequence_length,
                                     uint64_t seed, uint64_t model_vocabulary);

  // Whose answers the data marks; mostly none.
  const std::vector<std::string>& tasks() const { return folder_.manifest().tasks; }
  // Whole sequences in the data.
  uint64_t sequences() const { return sequences_; }

  // Training order: sequence `index` of an endless stream of epochs, each a permutation of all
  // sequences that only the seed and the epoch decide. A layout of fewer tokens gets one of the
  // parts of that length that the sequence divides into, which the seed and the index decide.
  LocalSequence Shuffled(uint64_t index, const kernels::ShardLayout& layout) const;
  // Evaluation order: as they lie in the data. index < sequences().
  LocalSequence InOrder(uint64_t index, const kernels::ShardLayout& layout) const;

 private:
  Loader(TokenFolder folder, uint64_t sequence_length, uint64_t seed);
  // The sequence that begins at token `start` of the stream.
  LocalSequence Read(uint64_t start, const kernels::ShardLayout& layout) const;

  TokenFolder folder_;
  uint64_t sequence_length_;
  uint64_t sequences_;
  uint64_t seed_;
};

// The sequences of a step's global batch, [0, global_batch), that data-parallel group `group` of
// `groups` trains: `assignment` [groups][…] if the plan has one, round robin otherwise.
// INVALID_ARGUMENT unless an assignment names every sequence once.
absl::StatusOr<std::vector<uint32_t>> SequencesOfGroup(
    uint32_t global_batch, uint32_t group, uint32_t groups,
    const std::vector<std::vector<uint32_t>>& assignment);

}  // namespace ringleader::data
