#include "cli/help.h"

#include <string>

#include "absl/strings/str_replace.h"
#include "cli/printer.h"

namespace ringleader::cli {
namespace {

constexpr int kColumns = 80;
constexpr int kNameColumns = 30;

class Formatter : public CLI::Formatter {
 public:
  Formatter() { column_width(kNameColumns); }

  // CLI11 shows of a flag that switches something off with what it switches it.
  std::string make_option_name(const CLI::Option* option, bool is_positional) const override {
    return absl::StrReplaceAll(CLI::Formatter::make_option_name(option, is_positional),
                               {{"{false}", ""}});
  }
  // CLI11 indents what follows a line's end.
  std::string make_option_desc(const CLI::Option* option) const override {
    return WrapToWidth(option->get_description(), kColumns - kNameColumns, "\n");
  }
  std::string make_subcommand(const CLI::App* command) const override {
    std::ostringstream out;
    CLI::detail::format_help(
        out, command->get_name(),
        WrapToWidth(command->get_description(), kColumns - kNameColumns, "\n"), kNameColumns);
    return out.str();
  }
};

}  // namespace

std::shared_ptr<CLI::Formatter> HelpFormatter() {
  return std::make_shared<Formatter>();
}

}  // namespace ringleader::cli
