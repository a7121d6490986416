#include "jobspec/fields/scalars.h"

#include <charconv>
#include <cmath>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

namespace ringleader::jobspec {
namespace {

using google::protobuf::EnumDescriptor;
using google::protobuf::EnumValueDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Reflection;

// What a user typed, safe to print on one line.
std::string Quote(std::string_view text) {
  constexpr size_t kShown = 60;
  const bool cut = text.size() > kShown;
  return absl::StrCat("'",
                      absl::CHexEscape(absl::string_view(text.data(), cut ? kShown : text.size())),
                      cut ? "…'" : "'");
}

absl::Status Expected(std::string_view text, const Field& field) {
  return absl::InvalidArgumentError(
      absl::StrCat(Quote(text), " is not allowed; give ", DescribeType(field)));
}

template <typename T>
bool ParseWhole(std::string_view text, T* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

bool ParseReal(std::string_view text, double* value) {
  return absl::SimpleAtod(absl::string_view(text.data(), text.size()), value) &&
         std::isfinite(*value);
}

}  // namespace

std::string FormatNumber(double value) {
  std::string text;
  for (const int digits : {6, 15, 17}) {
    text = absl::StrFormat("%.*g", digits, value);
    double back = 0;
    if (absl::SimpleAtod(text, &back) && back == value) break;
  }
  // Whole numbers read better without an exponent.
  if (absl::StrContains(text, 'e') && value == std::floor(value) && std::abs(value) < 1e15) {
    return absl::StrFormat("%.0f", value);
  }
  return text;
}

std::string EnumeratorText(const EnumDescriptor* type, int number) {
  if (number == 0) return "";
  const EnumValueDescriptor* value = type->FindValueByNumber(number);
  if (value == nullptr) return absl::StrCat(number);
  // Enumerators of one message share a scope: some begin with their type, as …_UNSPECIFIED does.
  const absl::string_view prefix =
      absl::StripSuffix(type->FindValueByNumber(0)->name(), "UNSPECIFIED");
  return absl::AsciiStrToLower(absl::StripPrefix(value->name(), prefix));
}

std::vector<std::string> EnumTexts(const Field& field) {
  std::vector<std::string> texts;
  if (field.default_value == "auto") texts.push_back("auto");
  const EnumDescriptor* type = FindDescriptor(field.path)->enum_type();
  for (int i = 0; i < type->value_count(); ++i) {
    if (type->value(i)->number() == 0) continue;
    texts.push_back(EnumeratorText(type, type->value(i)->number()));
  }
  return texts;
}

absl::Status CheckEnumerator(const Field& field, int number) {
  const EnumDescriptor* type = FindDescriptor(field.path)->enum_type();
  if (type->FindValueByNumber(number) != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(std::string(field.path), ": enumerator ", number,
                                                 " is unknown; give ", DescribeType(field)));
}

absl::Status SetScalar(const Slot& slot, const Field& field, std::string_view text) {
  const auto [message, descriptor] = slot;
  const Reflection* reflection = message->GetReflection();
  const bool append = descriptor->is_repeated();
  switch (descriptor->cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32: {
      uint32_t value = 0;
      if (!ParseWhole(text, &value)) return Expected(text, field);
      append ? reflection->AddUInt32(message, descriptor, value)
             : reflection->SetUInt32(message, descriptor, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_UINT64: {
      uint64_t value = 0;
      if (!ParseWhole(text, &value)) return Expected(text, field);
      reflection->SetUInt64(message, descriptor, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_INT32: {
      int32_t value = 0;
      if (!ParseWhole(text, &value)) return Expected(text, field);
      reflection->SetInt32(message, descriptor, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_BOOL: {
      if (text != "true" && text != "false") return Expected(text, field);
      reflection->SetBool(message, descriptor, text == "true");
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_DOUBLE: {
      double value = 0;
      if (!ParseReal(text, &value)) return Expected(text, field);
      reflection->SetDouble(message, descriptor, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_ENUM: {
      if (text == "auto" && field.default_value == "auto") {
        reflection->SetEnumValue(message, descriptor, 0);
        return absl::OkStatus();
      }
      const EnumDescriptor* type = descriptor->enum_type();
      for (int i = 0; i < type->value_count(); ++i) {
        const int number = type->value(i)->number();
        if (number != 0 && EnumeratorText(type, number) == text) {
          reflection->SetEnumValue(message, descriptor, number);
          return absl::OkStatus();
        }
      }
      return Expected(text, field);
    }
    default:
      if (text.find('\0') != std::string_view::npos) return Expected(text, field);
      reflection->SetString(message, descriptor, std::string(text));
      return absl::OkStatus();
  }
}

std::string GetScalar(const google::protobuf::Message& message, const FieldDescriptor* descriptor,
                      int index) {
  const Reflection* reflection = message.GetReflection();
  switch (descriptor->cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32:
      return absl::StrCat(descriptor->is_repeated()
                              ? reflection->GetRepeatedUInt32(message, descriptor, index)
                              : reflection->GetUInt32(message, descriptor));
    case FieldDescriptor::CPPTYPE_UINT64:
      return absl::StrCat(reflection->GetUInt64(message, descriptor));
    case FieldDescriptor::CPPTYPE_INT32:
      return absl::StrCat(reflection->GetInt32(message, descriptor));
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection->GetBool(message, descriptor) ? "true" : "false";
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return FormatNumber(reflection->GetDouble(message, descriptor));
    case FieldDescriptor::CPPTYPE_ENUM:
      return EnumeratorText(descriptor->enum_type(), reflection->GetEnumValue(message, descriptor));
    default:
      return reflection->GetString(message, descriptor);
  }
}

}  // namespace ringleader::jobspec
