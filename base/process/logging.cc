#include "base/process/logging.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string_view>
#include <utility>

#include "base/text/controls.h"

namespace ringleader {

void AddLoggingFlags(CLI::App& app, LoggingOptions* options) {
  app.add_option("--log-level", options->level, "least severe level that is logged")
      ->check(CLI::IsMember({"debug", "info", "warn", "error"}))
      ->capture_default_str();
}

namespace {

// The message, its control characters escaped.
class Escaped : public spdlog::custom_flag_formatter {
 public:
  explicit Escaped(std::string keep) : keep_(std::move(keep)) {}
  void format(const spdlog::details::log_msg& message, const std::tm&,
              spdlog::memory_buf_t& line) override {
    const std::string text =
        EscapeControls(std::string_view(message.payload.data(), message.payload.size()), keep_);
    line.append(text.data(), text.data() + text.size());
  }
  std::unique_ptr<spdlog::custom_flag_formatter> clone() const override {
    return std::make_unique<Escaped>(keep_);
  }

 private:
  const std::string keep_;
};

}  // namespace

void SetUpLogging(const std::string& program, const LoggingOptions& options) {
  auto logger =
      std::make_shared<spdlog::logger>(program, std::make_shared<spdlog::sinks::stderr_sink_mt>());
  auto lines = std::make_unique<spdlog::pattern_formatter>(spdlog::pattern_time_type::utc);
  lines->add_flag<Escaped>('*', options.one_line ? "\t" : "\t\n")
      .set_pattern("%Y-%m-%dT%H:%M:%S.%eZ %l %n[%P] %*");
  logger->set_formatter(std::move(lines));
  logger->set_level(spdlog::level::from_str(options.level));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace ringleader
