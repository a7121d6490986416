#include "base/process/config.h"

#include <sysexits.h>
#include <yaml-cpp/yaml.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <istream>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/process/version.h"
#include "base/text/controls.h"
#include "base/text/edit_distance.h"

namespace ringleader {
namespace {

// Which keys there are; of many, those that `name` may be a slip of.
std::string Hint(const std::string& name, const std::vector<std::string>& known) {
  constexpr size_t kFew = 12;
  constexpr size_t kSlip = 2;
  if (known.size() <= kFew) return "; known are: " + absl::StrJoin(known, ", ");
  std::vector<std::string> near;
  for (const std::string& one : known) {
    if (EditDistance(name, one) <= kSlip) near.push_back(one);
  }
  return near.empty() ? "; --help lists those that are known"
                      : "; did you mean " + absl::StrJoin(near, " or ") + "?";
}

class YamlConfig : public CLI::Config {
 public:
  // `app` must outlive this.
  explicit YamlConfig(const CLI::App& app) : app_(app) {}

  // CLI11 offers this for --dump options, which the programs do not have; ResolvedConfig() is the
  // same by other means.
  std::string to_config(const CLI::App* app, bool, bool, std::string) const override {
    return ResolvedConfig(*app);
  }

  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override {
    const absl::StatusOr<std::vector<ConfigLine>> lines = ReadConfig(input);
    if (!lines.ok()) {
      throw CLI::FileError("configuration file: " + std::string(lines.status().message()));
    }
    std::vector<CLI::ConfigItem> items;
    const std::vector<std::string> known = Known();
    for (const ConfigLine& line : *lines) {
      if (std::ranges::find(known, line.name) == known.end()) {
        throw CLI::FileError("configuration file: unknown key " + EscapeControls(line.name) +
                             Hint(line.name, known));
      }
      if (line.values.empty()) continue;
      CLI::ConfigItem& item = items.emplace_back();
      item.name = line.name;
      item.inputs = line.values;
    }
    return items;
  }

 private:
  std::vector<std::string> Known() const {
    std::vector<std::string> known;
    for (const CLI::Option* option : app_.get_options()) {
      known.insert(known.end(), option->get_lnames().begin(), option->get_lnames().end());
    }
    return known;
  }

  const CLI::App& app_;
};

// Before CLI11 opens it, which would wait for a pipe's writer and read a device without end.
CLI::Validator ConfigFile() {
  return CLI::Validator(
      [](std::string& path) {
        std::error_code error;
        const auto kind = std::filesystem::status(path, error);
        // CLI11 says itself that there is none.
        if (!std::filesystem::exists(kind)) return std::string();
        if (!std::filesystem::is_regular_file(kind)) {
          return EscapeControls(path) + " is no regular file; give a YAML file";
        }
        if (std::filesystem::file_size(path, error) <= kMaxConfigFileBytes) return std::string();
        return absl::StrCat(EscapeControls(path), " has more than ", kMaxConfigFileBytes,
                            " bytes; give a YAML file with flags alone");
      },
      "");
}

}  // namespace

absl::StatusOr<std::vector<ConfigLine>> ReadConfig(std::istream& input) {
  try {
    std::vector<ConfigLine> lines;
    const YAML::Node root = YAML::Load(input);
    if (root.IsNull()) return lines;
    if (!root.IsMap()) {
      return absl::InvalidArgumentError("it must be a map of \"name: value\" lines");
    }
    for (const auto& entry : root) {
      const auto name = entry.first.as<std::string>();
      if (std::ranges::find(lines, name, &ConfigLine::name) != lines.end()) {
        return absl::InvalidArgumentError(absl::StrCat(
            name, ": given twice; keep one, and of several values make a list: [a, b]"));
      }
      ConfigLine& line = lines.emplace_back();
      line.name = name;
      if (entry.second.IsMap()) {
        return absl::InvalidArgumentError(line.name + " must not be a map");
      }
      if (entry.second.IsSequence()) {
        for (const auto& value : entry.second) line.values.push_back(value.as<std::string>());
      } else if (!entry.second.IsNull()) {
        line.values.push_back(entry.second.as<std::string>());
      }
    }
    return lines;
  } catch (const std::exception& error) {  // YAML's, or the stream's: of a folder, for one
    return absl::InvalidArgumentError(error.what());
  }
}

std::optional<int> ParseArguments(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // The library has a number for each kind of mistake.
    return app.exit(error) == 0 ? 0 : EX_USAGE;
  }
  return std::nullopt;
}

std::optional<int> ParseFlags(CLI::App& app, int argc, char** argv) {
  app.config_formatter(std::make_shared<YamlConfig>(app));
  app.set_config("--config", "", "YAML file with any of these flags (without the dashes)")
      ->check(ConfigFile());
  app.set_version_flag("--version", std::string(kVersion));
  return ParseArguments(app, argc, argv);
}

std::string ResolvedConfig(const CLI::App& app) {
  YAML::Emitter out;
  out << YAML::BeginMap;
  for (const CLI::Option* option : app.get_options()) {
    // Options that act instead of configuring: --help, --version, and --config itself.
    if (!option->get_configurable() || option == app.get_config_ptr() ||
        option->get_lnames().empty())
      continue;
    const std::string& name = option->get_lnames().front();
    if (name == "help" || name == "version") continue;
    out << YAML::Key << name << YAML::Value;
    const bool is_flag = option->get_expected_max() == 0;
    if (is_flag) {
      out << (option->count() > 0 && option->as<bool>());
    } else if (option->count() == 0 && option->get_default_str().empty() &&
               option->get_expected_max() > 1) {
      out << YAML::Flow << YAML::BeginSeq << YAML::EndSeq;  // an empty text would be one value
    } else if (option->count() == 0) {
      out << option->get_default_str();
    } else if (option->results().size() == 1) {
      out << option->results().front();
    } else {
      out << YAML::Flow << option->results();
    }
  }
  out << YAML::EndMap;
  return std::string(out.c_str()) + "\n";
}

}  // namespace ringleader
