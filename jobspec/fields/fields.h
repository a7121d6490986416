// The table of the job file's fields: one row each drives parsing, defaults, limits, the reference
// page and ringctl's help. Types come from the message's descriptor, rows of one attention pattern
// from its definition (patterns/pattern.h).
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "google/protobuf/descriptor.h"
#include "patterns/pattern.h"
#include "ringleader/v1/job_spec.pb.h"

namespace ringleader::jobspec {

// Which specifications a field fits: those whose field `path` holds `value` (or does not); all, if
// there is no path. Elsewhere it is an error to set the field, and no default is filled in.
struct When {
  std::string_view path = {};
  std::string_view value = {};
  bool is_not = false;
};

enum class Need {
  kRequired,  // must be set
  kDefault,   // `default_value` is filled in when unset
  kDerived,   // filled in from other fields; `default_value` says how, for people
  kOptional,  // may stay empty
};

using patterns::Range;

struct Field {
  std::string_view path;
  Need need;
  std::string_view default_value;
  Range range;  // numbers only; elements of a list
  When when;
  std::string_view help;
  bool is_path = false;
  When also = {};                                             // both must hold
  double (*default_for)(uint64_t sequence_length) = nullptr;  // see patterns::PatternField
};

// All fields, in the order of the job file. A path that several patterns have stands in a row of
// each, of one type and range.
std::span<const Field> Fields();
const Field* FindField(std::string_view path);  // its first row
// Whether the rows of the field's path have defaults that differ.
bool HasDefaultByPattern(const Field& field);

// The known path nearest to `path` by edit distance, or one that ends in the same name; empty where
// none is so near that it may be meant.
std::string NearestField(std::string_view path);

// Whether the field fits `spec`, whose batching, pattern, select, layout, schedule and engine are
// filled in.
bool Fits(const Field& field, const v1::JobSpec& spec);
// Whether a row of this path does.
bool AnyFits(std::string_view path, const v1::JobSpec& spec);
// "attention.pattern: sliding_window", for the reference page; "" if it always fits.
std::string Requirement(const Field& field);
// Those of all rows of a path, for messages.
std::string Requirements(std::string_view path);

// "a number more than 0, at most 1", "one of dense, sliding_window, …", "text".
std::string DescribeType(const Field& field);

// The message that holds `path`'s field, and the field.
struct Slot {
  google::protobuf::Message* message;
  const google::protobuf::FieldDescriptor* descriptor;
};
Slot FindSlot(v1::JobSpec* spec, std::string_view path);
struct ConstSlot {
  const google::protobuf::Message* message;
  const google::protobuf::FieldDescriptor* descriptor;
};
ConstSlot FindSlot(const v1::JobSpec& spec, std::string_view path);
const google::protobuf::FieldDescriptor* FindDescriptor(std::string_view path);
// Present, for fields with presence; otherwise not zero and not empty.
bool IsSet(const v1::JobSpec& spec, std::string_view path);

}  // namespace ringleader::jobspec
