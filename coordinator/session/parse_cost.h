// What a message takes in memory once it is parsed, found without parsing it: whoever packs empty
// messages into a message makes a hundred bytes out of two.
#pragma once

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/zero_copy_stream.h>

#include <cstddef>

#include "absl/status/statusor.h"

namespace ringleader::session {

struct ParseCost {
  size_t bytes = 0;          // an upper bound, but for what malloc() adds
  bool has_unknown = false;  // fields that `type` does not have, which the parser keeps
};

// Reads a message of this type up to its end, or until it costs more than `max_bytes`.
// INVALID_ARGUMENT if it is not well-formed, or nested more deeply than protobuf's parser allows.
absl::StatusOr<ParseCost> CostToParse(const google::protobuf::Descriptor& type, size_t max_bytes,
                                      google::protobuf::io::ZeroCopyInputStream* wire);

}  // namespace ringleader::session
