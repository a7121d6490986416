// The one seam through which results are printed: a table for people, JSON or YAML for programs.
#pragma once

#include <functional>
#include <iosfwd>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "cli/context.h"

namespace google::protobuf {
class Message;
}

namespace ringleader::cli {

using TableWriter = std::function<void(std::ostream&)>;

// Prints `message` in the context's format; `table` writes the one for people. In YAML a job's
// specification has the form of a job file.
void Print(const Context& context, const google::protobuf::Message& message,
           const TableWriter& table);
void PrintJson(const Context& context, const nlohmann::ordered_json& document,
               const TableWriter& table);

// The message as an object that has every field, but messages, and fields declared optional, that
// are not set.
nlohmann::ordered_json ToJson(const google::protobuf::Message& message);
// The same on one line, without a line's end; control characters are escaped.
std::string ToJsonLine(const google::protobuf::Message& message);

// Left-aligned columns two spaces apart; the first row is the heading. Empty cells show as "-". On
// a terminal of `columns` the last cell of a row is cut with an ellipsis so that the row fits, to
// 10 characters at least; 0: no terminal.
void WriteColumns(std::ostream& out, const std::vector<std::vector<std::string>>& rows,
                  int columns = 0);
// `text` in at most `columns`, with an ellipsis where it was cut.
std::string CutToWidth(const std::string& text, int columns);

// `text` in lines of at most `columns`, cut between words and joined with `line_end`; words that
// are longer stay whole. 0: one line.
std::string WrapToWidth(const std::string& text, int columns, const std::string& line_end);

// Each in a line of its own behind a dash, and on a terminal of `columns` wrapped at its width; 0:
// no terminal.
void WriteNotes(std::ostream& out, const std::vector<std::string>& notes, int columns);

// "12,345", "1.3 GiB", "1h02m", "95.3 %", "3d", in few characters.
std::string FormatCount(double value);
std::string FormatBytes(double bytes);
std::string FormatSeconds(double seconds);
std::string FormatPercent(double share);
std::string FormatAge(absl::Duration age);

}  // namespace ringleader::cli
