#include "base/process/config.h"

#include <yaml-cpp/yaml.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <istream>
#include <memory>

#include "absl/strings/str_join.h"
#include "base/process/version.h"

namespace ringleader {
namespace {

class YamlConfig : public CLI::Config {
 public:
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
    for (const ConfigLine& line : *lines) {
      if (line.values.empty()) continue;
      CLI::ConfigItem& item = items.emplace_back();
      item.name = line.name;
      item.inputs = line.values;
    }
    return items;
  }
};

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
      ConfigLine& line = lines.emplace_back();
      line.name = entry.first.as<std::string>();
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

std::optional<int> ParseFlags(CLI::App& app, int argc, char** argv) {
  app.config_formatter(std::make_shared<YamlConfig>());
  app.set_config("--config", "", "YAML file with any of these flags (without the dashes)");
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.set_version_flag("--version", std::string(kVersion));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ConfigError& error) {
    std::vector<std::string> known;
    for (const CLI::Option* option : app.get_options()) {
      for (const std::string& name : option->get_lnames()) known.push_back(name);
    }
    std::cerr << app.get_name() << ": configuration file: " << error.what()
              << "; known are: " << absl::StrJoin(known, ", ") << "\n";
    return error.get_exit_code();
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  return std::nullopt;
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
