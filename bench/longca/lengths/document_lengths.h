// Lengths of the documents that a sequence is packed of.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ringleader::bench {

class DocumentLengths {
 public:
  // ProLong-like, as in bench/length_distributions.h: those of a sequence of 131,072 tokens, scaled
  // to the sequence's.
  DocumentLengths() = default;

  // Of a file in the form of LongCA-bench's histograms (arXiv 2510.17896), as pile.json beside this
  // file is: JSON, the share of documents by "[low,high)", lengths that are even over their
  // logarithms there and are taken as they are. INVALID_ARGUMENT says what is wrong with it.
  static absl::StatusOr<DocumentLengths> OfHistogram(const std::string& path);

  // "ProLong-like", or the file's name without folders and extension.
  const std::string& name() const { return name_; }

  // Where the documents of a sequence of so many tokens begin. The last one is cut off at its end.
  // masks/lengths.py draws the same.
  std::vector<int32_t> Firsts(int64_t tokens, uint64_t seed) const;

 private:
  // `until`: the share of documents up to its longest, of all.
  struct Bin {
    double low = 0, high = 0, until = 0;
  };

  std::vector<Bin> bins_ = {{65536, 262144, 0.055}, {1024, 65536, 1.0}};
  double of_tokens_ = 131072;  // that lengths are scaled from; 0: they stay as they are
  std::string name_ = "ProLong-like";
};

}  // namespace ringleader::bench
