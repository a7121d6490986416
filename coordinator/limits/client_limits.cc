#include "coordinator/limits/client_limits.h"

#include <CLI/CLI.hpp>
#include <string>

namespace ringleader::limits {
namespace {

// What was spent of submitted bytes is back after so many seconds.
constexpr int64_t kSecondsToRefill = 16;

constexpr char kChecks[] =
    "submissions, validations, histories and lists by label at the same time";

void AddLimit(CLI::App& app, const std::string& name, const std::string& what, int64_t* in_all,
              int64_t* per_client) {
  const auto add = [&](const std::string& flag, const std::string& who, int64_t* value) {
    app.add_option(flag, *value, "At most so many " + what + " of " + who)
        ->check(CLI::Range(int64_t{1}, int64_t{1} << 32))
        ->capture_default_str()
        ->group("Limits");
  };
  add(name, "all clients", in_all);
  add(name + "-per-client", "one client", per_client);
}

ByteRate::Allowance Submitted(int64_t mebibytes) {
  const int64_t bytes = mebibytes << 20;
  return {.bytes = bytes, .bytes_per_second = bytes / kSecondsToRefill};
}

}  // namespace

void AddLimitFlags(CLI::App& app, Options* options) {
  AddLimit(app, "--calls", "calls at the same time", &options->calls, &options->calls_per_client);
  AddLimit(app, "--checks", std::string(kChecks), &options->checks, &options->checks_per_client);
  AddLimit(app, "--health-calls", "health checks and watches at the same time",
           &options->health_calls, &options->health_calls_per_client);
  AddLimit(app, "--unread-mebibytes",
           "MiB of answers that are not read yet, and as many of watches and logs",
           &options->unread_mebibytes, &options->unread_mebibytes_per_client);
  AddLimit(app, "--watches", "open watches and logs", &options->watches,
           &options->watches_per_client);
  AddLimit(app, "--submitted-mebibytes", "MiB of job files in 16 s", &options->submitted_mebibytes,
           &options->submitted_mebibytes_per_client);
  AddLimit(app, "--silent-sessions", "sessions of workers that have not said who they are",
           &options->silent_sessions, &options->silent_sessions_per_client);
}

Limits::Limits(const Options& options, const Clock* clock, prometheus::Registry* registry)
    : metrics(registry),
      calls({.label = "calls",
             .what = "calls at the same time",
             .flag = "--calls",
             .remedy = "wait until some have ended"},
            options.calls_per_client, options.calls, &metrics),
      checks({.label = "checks",
              .what = std::string(kChecks),
              .flag = "--checks",
              .remedy = "wait until some have ended"},
             options.checks_per_client, options.checks, &metrics),
      health_calls({.label = "health_calls",
                    .what = "health checks and watches at the same time",
                    .flag = "--health-calls",
                    .remedy = "end some"},
                   options.health_calls_per_client, options.health_calls, &metrics),
      unread_answers({.label = "unread_answers",
                      .what = "bytes of answers that are not read yet",
                      .flag = "--unread-mebibytes",
                      .remedy = "read those that were sent"},
                     options.unread_mebibytes_per_client << 20, options.unread_mebibytes << 20,
                     &metrics),
      unread_messages({.label = "unread_messages",
                       .what = "bytes of watches and logs that are not read yet",
                       .flag = "--unread-mebibytes",
                       .remedy = "read those that were sent, or end some"},
                      options.unread_mebibytes_per_client << 20, options.unread_mebibytes << 20,
                      &metrics),
      watches({.label = "watches",
               .what = "open watches and logs",
               .flag = "--watches",
               .remedy = "end some"},
              options.watches_per_client, options.watches, &metrics),
      silent_sessions({.label = "silent_sessions",
                       .what = "sessions without a hello",
                       .flag = "--silent-sessions",
                       .remedy = "say hello in those that are open, or end them"},
                      options.silent_sessions_per_client, options.silent_sessions, &metrics),
      submitted({.label = "submitted_bytes",
                 .what = "submitted bytes",
                 .flag = "--submitted-mebibytes",
                 .remedy = "send smaller job files, or wait"},
                Submitted(options.submitted_mebibytes_per_client),
                Submitted(options.submitted_mebibytes), clock, &metrics) {}

}  // namespace ringleader::limits
