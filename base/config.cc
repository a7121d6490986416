#include "base/config.h"

#include <yaml-cpp/yaml.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <istream>
#include <memory>

#include "absl/strings/str_join.h"
#include "base/version.h"

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
    std::vector<CLI::ConfigItem> items;
    try {
      const YAML::Node root = YAML::Load(input);
      if (root.IsNull()) return items;
      if (!root.IsMap())
        throw CLI::FileError("the configuration file must be a map of \"flag: value\" lines");
      for (const auto& entry : root) {
        CLI::ConfigItem item;
        item.name = entry.first.as<std::string>();
        if (entry.second.IsMap())
          throw CLI::FileError("configuration file: " + item.name + " must not be a map");
        if (entry.second.IsSequence()) {
          for (const auto& value : entry.second) item.inputs.push_back(value.as<std::string>());
        } else if (!entry.second.IsNull()) {
          item.inputs.push_back(entry.second.as<std::string>());
        }
        if (!item.inputs.empty()) items.push_back(std::move(item));
      }
    } catch (const YAML::Exception& error) {
      throw CLI::FileError(std::string("configuration file: ") + error.what());
    }
    return items;
  }
};

}  // namespace

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
