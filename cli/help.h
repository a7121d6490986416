// How --help looks: in 80 columns.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>

namespace ringleader::cli {

// For the app, before commands are added to it: they take it over.
std::shared_ptr<CLI::Formatter> HelpFormatter();

}  // namespace ringleader::cli
