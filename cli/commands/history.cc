// ringctl history: every step of a job, for spreadsheets and notebooks.
#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "cli/client.h"
#include "cli/commands/commands.h"
#include "cli/job_text.h"
#include "cli/jobs/steps.h"
#include "cli/printer.h"
#include "proto/phase_fields.h"
#include "proto/timestamps.h"

namespace ringleader::cli {
namespace {

std::string Exact(double value) {
  return absl::StrFormat("%.9g", value);
}

// RFC 4180; no value needs quotes. Empty: not known of this step.
void WriteCsv(std::ostream& out, const JobSteps& all) {
  std::vector<std::string> heading = {"step",
                                      "time",
                                      "loss",
                                      "heldout_loss",
                                      "gradient_norm",
                                      "learning_rate",
                                      "tokens",
                                      "step_seconds",
                                      "tokens_per_second",
                                      "density",
                                      "worker_imbalance",
                                      "step_imbalance",
                                      "ring_imbalance",
                                      "group_imbalance",
                                      "peak_memory_bytes",
                                      "plan_version",
                                      "skipped"};
  ForEachPhase(v1::PhaseSeconds(), [&](const std::string& name, double) {
    heading.push_back(absl::StrCat(name, "_seconds"));
  });
  out << absl::StrJoin(heading, ",") << "\r\n";
  for (const auto& [number, step] : all.steps) {
    const auto eval = all.evals.find(number);
    std::vector<std::string> row = {
        absl::StrCat(number),
        step.has_time()
            ? absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", ToTime(step.time()), absl::UTCTimeZone())
            : "",
        Exact(step.loss()),
        eval == all.evals.end() ? "" : Exact(eval->second.loss()),
        Exact(step.gradient_norm()),
        Exact(step.learning_rate()),
        absl::StrCat(step.tokens()),
        Exact(step.step_seconds()),
        Exact(TokensPerSecond(step)),
        step.layers().empty() ? "" : Exact(MeanDensity(step)),
        Exact(step.worker_imbalance()),
        Exact(step.step_imbalance()),
        Exact(step.ring_imbalance()),
        Exact(step.group_imbalance()),
        absl::StrCat(step.peak_memory_bytes()),
        absl::StrCat(step.plan_version()),
        step.skipped() ? "true" : "false"};
    ForEachPhase(step.phases(),
                 [&](const std::string&, double seconds) { row.push_back(Exact(seconds)); });
    out << absl::StrJoin(row, ",") << "\r\n";
  }
}

void WriteTable(std::ostream& out, const JobSteps& all) {
  std::vector<std::vector<std::string>> rows = {
      {"STEP", "LOSS", "HELD-OUT", "TOKENS/S", "SECONDS", "DENSITY", "IMBALANCE", "SKIPPED"}};
  for (const auto& [number, step] : all.steps) {
    const auto eval = all.evals.find(number);
    rows.push_back({absl::StrCat(number), absl::StrFormat("%.4f", step.loss()),
                    eval == all.evals.end() ? "" : absl::StrFormat("%.4f", eval->second.loss()),
                    FormatCount(TokensPerSecond(step)),
                    absl::StrFormat("%.2f", step.step_seconds()),
                    step.layers().empty() ? "" : FormatPercent(MeanDensity(step)),
                    absl::StrFormat("%.3f", step.worker_imbalance()), step.skipped() ? "yes" : ""});
  }
  WriteColumns(out, rows);
}

absl::StatusOr<int> History(const Context& context, const std::string& name) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(context));
  ASSIGN_OR_RETURN(const JobSteps all, ReadSteps(client.get(), name));
  if (context.format == Format::kCsv) {
    WriteCsv(context.out, all);
  } else if (context.format == Format::kJsonLines) {
    for (const auto& [number, step] : all.steps) context.out << ToJsonLine(step) << "\n";
  } else {
    nlohmann::ordered_json document = {{"name", ShortName(all.job.name())},
                                       {"steps", nlohmann::ordered_json::array()},
                                       {"evals", nlohmann::ordered_json::array()}};
    for (const auto& [number, step] : all.steps) document["steps"].push_back(ToJson(step));
    for (const auto& [number, eval] : all.evals) document["evals"].push_back(ToJson(eval));
    PrintJson(context, document, [&](std::ostream& out) { WriteTable(out, all); });
  }
  return kOk;
}

}  // namespace

void AddHistoryCommand(CLI::App& app, Context* context) {
  auto name = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand(
      "history", "print every step of a job up to now; -o csv or jsonl for programs");
  command->add_option("job", *name, "name of the job")->required();
  command->callback([=] {
    context->more_formats = {Format::kCsv, Format::kJsonLines};
    context->action = [=] { return History(*context, *name); };
  });
}

}  // namespace ringleader::cli
