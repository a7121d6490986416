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
#include "ringleader/v1/job.pb.h"
#include "ringleader/v1/job_service.pb.h"

namespace ringleader::cli {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kTwoDays = int64_t{48} * 3600;  // s

YAML::Node ToYamlNode(const ordered_json& value) {
  YAML::Node node;
  if (value.is_object()) {
    node = YAML::Node(YAML::NodeType::Map);
    for (const auto& [key, child] : value.items()) node[key] = ToYamlNode(child);
  } else if (value.is_array()) {
    node = YAML::Node(YAML::NodeType::Sequence);
    for (const ordered_json& child : value) node.push_back(ToYamlNode(child));
  } else if (value.is_string()) {
    node = value.get<std::string>();
  } else {
    node = YAML::Load(value.dump());
  }
  return node;
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

std::string ToText(const YAML::Node& node, bool ascii = false) {
  YAML::Emitter emitter;
  if (ascii) emitter.SetOutputCharset(YAML::EscapeNonAscii);
  emitter << node;
  const std::string text = emitter.c_str();
  return !ascii && HasControlsToEscape(text) ? ToText(node, true) : text;
}

}  // namespace

ordered_json ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string text;
  // Fails only for messages with Any or for strings that are no UTF-8; ours have neither.
  const auto status = google::protobuf::util::MessageToJsonString(message, &text, options);
  if (!status.ok()) return ordered_json::object();
  ordered_json document = ordered_json::parse(text);
  // An empty list is a list, so that programs need not ask whether it is there.
  const google::protobuf::Descriptor* type = message.GetDescriptor();
  for (int i = 0; i < type->field_count(); ++i) {
    const google::protobuf::FieldDescriptor* field = type->field(i);
    if (field->is_repeated() && !field->is_map() && !document.contains(field->name())) {
      document[field->name()] = ordered_json::array();
    }
  }
  return document;
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
  YAML::Node node = ToYamlNode(document);
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
    context.out << ToText(ToYamlNode(document)) << "\n";
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
