#include "cli/printer.h"

#include <google/protobuf/util/json_util.h>
#include <locale.h>
#include <wchar.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cmath>
#include <cwchar>
#include <nlohmann/json.hpp>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/text/controls.h"
#include "jobspec/fields/text.h"
#include "jobspec/jobspec.h"
#include "ringleader/v1/access.pb.h"
#include "ringleader/v1/job.pb.h"
#include "ringleader/v1/job_service.pb.h"

namespace ringleader::cli {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using nlohmann::ordered_json;

constexpr int64_t kTwoDays = int64_t{48} * 3600;  // s

// The tag that yaml-cpp gives to what is quoted in a file: it is text, whatever it looks like.
constexpr char kTextTag[] = "!";

YAML::Node TextNode(const std::string& text) {
  YAML::Node node(text);
  node.SetTag(kTextTag);
  return node;
}

// Whether its strings in JSON are text. Whole numbers of 64 bits and times are strings there, too.
bool IsText(const FieldDescriptor* field) {
  return field == nullptr || field->cpp_type() == FieldDescriptor::CPPTYPE_STRING ||
         field->cpp_type() == FieldDescriptor::CPPTYPE_ENUM;
}

// The field of this name of the messages that documents are put together of, null if none has one.
const FieldDescriptor* PartNamed(const std::string& name) {
  for (const Descriptor* type : {v1::WatchJobResponse::descriptor(),
                                 v1::ValidateJobResponse::descriptor(), v1::Token::descriptor()}) {
    if (const FieldDescriptor* field = type->FindFieldByName(name)) return field;
  }
  return nullptr;
}

const FieldDescriptor* FieldNamed(const std::string& name, const Descriptor* type) {
  if (type == nullptr) return PartNamed(name);
  const FieldDescriptor* value = type->map_value();  // null unless it is an entry of a map
  return value != nullptr ? value : type->FindFieldByName(name);
}

// `type`: of the message that it is; null: a document that was put together.
YAML::Node ToYamlNode(const ordered_json& value, const Descriptor* type, bool is_text = true) {
  if (value.is_object()) {
    YAML::Node node(YAML::NodeType::Map);
    for (const auto& [key, child] : value.items()) {
      const FieldDescriptor* field = FieldNamed(key, type);
      node[TextNode(key)] =
          ToYamlNode(child, field == nullptr ? nullptr : field->message_type(), IsText(field));
    }
    return node;
  }
  if (value.is_array()) {
    YAML::Node node(YAML::NodeType::Sequence);
    for (const ordered_json& child : value) node.push_back(ToYamlNode(child, type, is_text));
    return node;
  }
  if (!value.is_string()) return YAML::Load(value.dump());
  return is_text ? TextNode(value.get<std::string>()) : YAML::Node(value.get<std::string>());
}

// The specification as its job file, so that it can be submitted again.
void UseJobFileForm(const v1::Job& job, YAML::Node node) {
  if (job.has_spec()) node["spec"] = YAML::Load(jobspec::ToYaml(job.spec()));
}

// Neither JSON nor YAML has to escape the control characters of Unicode's second block, which
// terminals obey as well: where there are any, all beyond ASCII is escaped.
bool HasControlsToEscape(const std::string& document) {
  return EscapeControls(document, "\n") != document;
}

std::string ToText(const ordered_json& document) {
  const std::string text = document.dump(2);
  return HasControlsToEscape(text) ? document.dump(2, ' ', true) : text;
}

// As yaml-cpp does, but that it would leave out the quotes that keep text from being read as
// something else.
void Emit(const YAML::Node& node, YAML::Emitter* out) {
  if (node.Style() == YAML::EmitterStyle::Flow) *out << YAML::Flow;
  if (node.IsMap()) {
    *out << YAML::BeginMap;
    for (const auto& entry : node) {
      *out << YAML::Key;
      Emit(entry.first, out);
      *out << YAML::Value;
      Emit(entry.second, out);
    }
    *out << YAML::EndMap;
  } else if (node.IsSequence()) {
    *out << YAML::BeginSeq;
    for (const auto& element : node) Emit(element, out);
    *out << YAML::EndSeq;
  } else if (node.IsScalar()) {
    const bool is_quoted = node.Tag() == kTextTag && LooksLikeOtherThanText(node.Scalar());
    if (is_quoted) *out << YAML::DoubleQuoted;
    *out << node.Scalar();
  } else {
    *out << YAML::Null;
  }
}

std::string ToText(const YAML::Node& node, bool ascii = false) {
  YAML::Emitter emitter;
  if (ascii) emitter.SetOutputCharset(YAML::EscapeNonAscii);
  Emit(node, &emitter);
  const std::string text = emitter.c_str();
  return !ascii && HasControlsToEscape(text) ? ToText(node, true) : text;
}

}  // namespace

ordered_json ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  // Zeros, and empty lists, so that programs need not ask whether they are there.
  options.always_print_primitive_fields = true;
  std::string text;
  // Fails only for messages with Any or for strings that are no UTF-8; ours have neither.
  const auto status = google::protobuf::util::MessageToJsonString(message, &text, options);
  return status.ok() ? ordered_json::parse(text) : ordered_json::object();
}

std::string ToJsonLine(const google::protobuf::Message& message) {
  const std::string text = ToJson(message).dump();
  return HasControlsToEscape(text) ? ToJson(message).dump(-1, ' ', true) : text;
}

void Print(const Context& context, const google::protobuf::Message& message,
           const TableWriter& table) {
  if (context.format == Format::kTable) return table(context.out);
  const ordered_json document = ToJson(message);
  if (context.format == Format::kJson) {
    context.out << ToText(document) << "\n";
    return;
  }
  YAML::Node node = ToYamlNode(document, message.GetDescriptor());
  if (const auto* job = dynamic_cast<const v1::Job*>(&message)) UseJobFileForm(*job, node);
  if (const auto* list = dynamic_cast<const v1::ListJobsResponse*>(&message)) {
    for (int i = 0; i < list->jobs_size(); ++i) UseJobFileForm(list->jobs(i), node["jobs"][i]);
  }
  context.out << ToText(node) << "\n";
}

void PrintJson(const Context& context, const ordered_json& document, const TableWriter& table) {
  if (context.format == Format::kTable) return table(context.out);
  if (context.format == Format::kJson) {
    context.out << ToText(document) << "\n";
  } else {
    context.out << ToText(ToYamlNode(document, nullptr)) << "\n";
  }
}

namespace {

// What stays of a cell that is cut, so that something can be read.
constexpr int kLeastColumns = 10;

// The bytes of the character at text[begin], and the columns that it takes on a terminal: two for
// those of East Asia, none for accents that go with the one before.
struct Character {
  size_t bytes = 1;
  int columns = 1;
};
Character CharacterAt(const std::string& text, size_t begin) {
  // glibc has it for any locale whose texts are UTF-8.
  static const locale_t kUtf8 = newlocale(LC_CTYPE_MASK, "C.UTF-8", nullptr);
  const locale_t before = uselocale(kUtf8);
  wchar_t character = 0;
  std::mbstate_t state{};
  const size_t bytes = std::mbrtowc(&character, &text[begin], text.size() - begin, &state);
  const int columns = wcwidth(character);
  uselocale(before);
  const bool is_one = bytes > 0 && bytes <= text.size() - begin;
  return {.bytes = is_one ? bytes : 1, .columns = is_one && columns >= 0 ? columns : 1};
}

int Width(const std::string& text) {
  int columns = 0;
  for (size_t at = 0; at < text.size();) {
    const Character character = CharacterAt(text, at);
    columns += character.columns;
    at += character.bytes;
  }
  return columns;
}

}  // namespace

std::string CutToWidth(const std::string& text, int columns) {
  if (Width(text) <= columns) return text;
  size_t end = 0;
  for (int left = columns - 1; end < text.size();) {  // one is the ellipsis's
    const Character character = CharacterAt(text, end);
    left -= character.columns;
    if (left < 0) break;
    end += character.bytes;
  }
  return text.substr(0, end) + (columns > 0 ? "…" : "");
}

std::string WrapToWidth(const std::string& text, int columns, const std::string& line_end) {
  if (columns <= 0) return text;
  std::string wrapped;
  int used = 0;
  for (const auto word : absl::StrSplit(text, ' ')) {
    const int width = Width(std::string(word));
    if (!wrapped.empty()) {
      const bool fits = used + 1 + width <= columns;
      wrapped += fits ? " " : line_end;
      used = fits ? used + 1 : 0;
    }
    absl::StrAppend(&wrapped, word);
    used += width;
  }
  return wrapped;
}

void WriteNotes(std::ostream& out, const std::vector<std::string>& notes, int columns) {
  for (const std::string& note : notes) {
    out << "- " << WrapToWidth(EscapeControls(note), columns - 2, "\n  ") << "\n";
  }
}

void WriteColumns(std::ostream& out, const std::vector<std::vector<std::string>>& rows,
                  int columns) {
  std::vector<int> widths;
  // Cells hold what users, nodes and trainers wrote, and terminals obey control characters.
  const auto shown = [](const std::string& cell) {
    return cell.empty() ? std::string("-") : EscapeControls(cell);
  };
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], Width(shown(row[i])));
  }
  for (const auto& row : rows) {
    std::string line;
    int used = 0;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string cell = shown(row[i]);
      if (i + 1 < row.size()) {
        line += cell;
        line.append(widths[i] - Width(cell) + 2, ' ');
        used += widths[i] + 2;
      } else {
        line += columns > 0 ? CutToWidth(cell, std::max(kLeastColumns, columns - used)) : cell;
      }
    }
    out << line << "\n";
  }
}

std::string FormatCount(double value) {
  const std::string digits = absl::StrFormat("%.0f", std::abs(value));
  std::string grouped = value < 0 ? "-" : "";
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) grouped += ',';
    grouped += digits[i];
  }
  return grouped;
}

std::string FormatBytes(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.*f %s", unit == 0 ? 0 : 1, bytes, kUnits[unit]);
}

std::string FormatSeconds(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "-";
  if (seconds < 10) return absl::StrFormat("%.2gs", seconds);
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  if (whole < 60) return absl::StrFormat("%ds", whole);
  if (whole < 3600) return absl::StrFormat("%dm%02ds", whole / 60, whole % 60);
  if (whole < kTwoDays) return absl::StrFormat("%dh%02dm", whole / 3600, whole / 60 % 60);
  return absl::StrFormat("%dd%02dh", whole / 86400, whole / 3600 % 24);
}

std::string FormatPercent(double share) {
  return absl::StrFormat("%.1f %%", 100 * share);
}

std::string FormatAge(absl::Duration age) {
  const int64_t seconds = std::max<int64_t>(0, absl::ToInt64Seconds(age));
  if (seconds < 120) return absl::StrFormat("%ds", seconds);
  if (seconds < 7200) return absl::StrFormat("%dm", seconds / 60);
  if (seconds < kTwoDays) return absl::StrFormat("%dh", seconds / 3600);
  return absl::StrFormat("%dd", seconds / 86400);
}

}  // namespace ringleader::cli
