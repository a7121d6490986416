// Single values of the job file, between text and message fields.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "jobspec/fields/fields.h"

namespace ringleader::jobspec {

// The shortest text that reads back as the same number: "0.9", "3e-4", "16384".
std::string FormatNumber(double value);

// The enumerators as the job file writes them; with "auto" first where 0 leaves the choice open.
std::vector<std::string> EnumTexts(const Field& field);
// "" for 0, which says nothing; an unknown number as it is.
std::string EnumeratorText(const google::protobuf::EnumDescriptor* type, int number);

// INVALID_ARGUMENT names the field of an enumerator that this program does not know: numbers from a
// newer client arrive as they are.
absl::Status CheckEnumerator(const Field& field, int number);

// Sets the slot (appends, if it is a list). The error says what is allowed but not for which field.
absl::Status SetScalar(const Slot& slot, const Field& field, std::string_view text);

// The slot's value; `index` is for lists.
std::string GetScalar(const google::protobuf::Message& message,
                      const google::protobuf::FieldDescriptor* descriptor, int index = 0);

}  // namespace ringleader::jobspec
