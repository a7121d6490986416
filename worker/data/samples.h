// The samples of a token stream: which of its documents, or parts of documents, are trained as one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/data/token_folder.h"

namespace ringleader::data {

// Tokens [start, start + tokens) of the stream; the label of each is the token after it.
struct Sample {
  uint64_t start = 0;
  uint64_t tokens = 0;
  // Passes over the data before this one, counted from 1 in training; 0: evaluation.
  uint64_t epoch = 0;
};

// What becomes of a document that is longer than a micro-batch.
enum class Overlong {
  kRefuse,  // an error with their number
  kSplit,   // consecutive samples, all but the last as long as a micro-batch
  kDrop,    // none of it is trained
};

struct SampleCounts {
  uint64_t documents = 0;        // with something to predict
  uint64_t overlong = 0;         // of them: too long
  uint64_t overlong_tokens = 0;  // in those
};

struct SampleIndex {
  std::vector<Sample> samples;  // as they lie in the stream
  SampleCounts counts;
};

// A document's last token predicts nothing and is no part of its sample but the last label, so a
// document of n tokens is a sample of n - 1, and one of a single token none. FAILED_PRECONDITION,
// with the numbers and what to change, where documents are too long and `overlong` refuses them, or
// no sample is left.
absl::StatusOr<SampleIndex> IndexSamples(const TokenFolder& folder, const std::string& name,
                                         uint64_t most_tokens, Overlong overlong);

}  // namespace ringleader::data
