// What a job's training came to, from the steps that the coordinator keeps.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/numbers/mean.h"
#include "base/status_macros.h"
#include "cli/client.h"
#include "cli/commands/commands.h"
#include "cli/job_text.h"
#include "cli/jobs/steps.h"
#include "cli/printer.h"
#include "proto/phase_fields.h"
#include "proto/states.h"

namespace ringleader::cli {
namespace {

struct Totals {
  v1::Job job;
  size_t steps = 0;
  size_t skipped = 0, skipped_at_end = 0;  // of them, without an update
  double loss_first = 0, loss_last = 0;    // of those with one
  double tokens = 0, seconds = 0;
  double samples = 0, micro_batches = 0, padding_tokens = 0;  // where documents are samples
  Mean dealt_imbalance;
  uint64_t overlong_documents = 0, overlong_tokens = 0;
  Mean worker_imbalance, step_imbalance, ring_imbalance, group_imbalance, density;
  double head_bytes = 0;  // of the rank that sent most
  double ring_bytes = 0, whole_ring_bytes = 0;
  std::map<uint32_t, Mean> layer_density, layer_recall;
  std::map<uint32_t, std::vector<Mean>> probed_recall;              // by head
  std::map<uint32_t, Mean> verticals_at_budget, slashes_at_budget;  // of layers with a recall
  double balanced = 0, anchor_missed = 0;                           // calls of layers, all ranks
  v1::PhaseSeconds phases;
};

Totals Sum(const v1::Job& job, const std::map<uint64_t, v1::StepReport>& steps) {
  Totals totals;
  totals.job = job;
  totals.steps = steps.size();
  bool has_loss = false;
  for (const auto& [number, step] : steps) {
    totals.skipped += step.skipped() ? 1 : 0;
    totals.skipped_at_end = step.skipped() ? totals.skipped_at_end + 1 : 0;
    if (!step.skipped()) {
      if (!has_loss) totals.loss_first = step.loss();
      totals.loss_last = step.loss();
      has_loss = true;
    }
    totals.tokens += static_cast<double>(step.tokens());
    totals.seconds += step.step_seconds();
    totals.samples += static_cast<double>(step.samples());
    totals.micro_batches += static_cast<double>(step.micro_batches());
    totals.padding_tokens += static_cast<double>(step.padding_tokens());
    if (step.samples() > 0) totals.dealt_imbalance.Add(step.dealt_imbalance());
    totals.overlong_documents = step.overlong_documents();
    totals.overlong_tokens = step.overlong_tokens();
    totals.worker_imbalance.Add(step.worker_imbalance());
    totals.head_bytes += static_cast<double>(step.head_bytes());
    totals.ring_bytes += static_cast<double>(step.ring_bytes());
    totals.whole_ring_bytes += static_cast<double>(step.whole_ring_bytes());
    totals.step_imbalance.Add(step.step_imbalance());
    // Unset in steps of earlier releases.
    if (step.ring_imbalance() > 0) totals.ring_imbalance.Add(step.ring_imbalance());
    if (step.group_imbalance() > 0) totals.group_imbalance.Add(step.group_imbalance());
    for (const v1::LayerReport& layer : step.layers()) {
      totals.density.Add(layer.density());
      totals.layer_density[layer.layer()].Add(layer.density());
      totals.balanced += static_cast<double>(layer.balanced());
      totals.anchor_missed += static_cast<double>(layer.anchor_missed());
      if (layer.probed_recall_by_head_size() > 0) {
        std::vector<Mean>& heads = totals.probed_recall[layer.layer()];
        heads.resize(layer.probed_recall_by_head_size());
        for (size_t head = 0; head < heads.size(); ++head) {
          heads[head].Add(layer.probed_recall_by_head(static_cast<int>(head)));
        }
      }
      if (layer.recall() < 0) continue;
      totals.layer_recall[layer.layer()].Add(layer.recall());
      totals.verticals_at_budget[layer.layer()].Add(layer.verticals_at_budget());
      totals.slashes_at_budget[layer.layer()].Add(layer.slashes_at_budget());
    }
    CombinePhases(step.phases(), std::plus<>(), &totals.phases);
  }
  return totals;
}

nlohmann::ordered_json ByLayer(const std::map<uint32_t, Mean>& means) {
  nlohmann::ordered_json values = nlohmann::ordered_json::array();
  for (const auto& [layer, mean] : means) values.push_back(mean.value());
  return values;
}

nlohmann::ordered_json ByHead(const std::map<uint32_t, std::vector<Mean>>& layers) {
  nlohmann::ordered_json values = nlohmann::ordered_json::object();
  for (const auto& [layer, heads] : layers) {
    nlohmann::ordered_json& row = values[absl::StrCat(layer)] = nlohmann::ordered_json::array();
    for (const Mean& head : heads) row.push_back(head.value());
  }
  return values;
}

// Which field of the job file bounds what most heads of a layer keep: its mass, or its cap.
std::string BoundBy(const Totals& totals, const Mean& at_budget, const char* mass,
                    const char* cap) {
  if (at_budget.value() < 0.5) return mass;
  return totals.job.spec().attention().density() > 0 ? "density" : cap;
}

// Density and recall by layer, on the rows of the choice and of the probe; and what bounds them.
void WriteLayers(std::ostream& out, const Totals& totals, int columns) {
  if (totals.layer_density.empty()) return;
  std::vector<std::vector<std::string>> rows = {
      {"LAYER", "DENSITY", "RECALL", "PROBED", "WORST HEAD", "DIAGONALS BY", "COLUMNS BY"}};
  for (const auto& [layer, density] : totals.layer_density) {
    std::vector<std::string>& row = rows.emplace_back(rows[0].size());
    row[0] = absl::StrCat(layer);
    row[1] = FormatPercent(density.value());
    if (const auto recall = totals.layer_recall.find(layer); recall != totals.layer_recall.end()) {
      row[2] = FormatPercent(recall->second.value());
    }
    const auto pattern = totals.job.spec().attention().pattern();
    const bool has_both = pattern == v1::AttentionSpec::VERTICAL_SLASH ||
                          pattern == v1::AttentionSpec::PATTERN_UNSPECIFIED;
    if (has_both && totals.slashes_at_budget.contains(layer)) {
      row[5] = BoundBy(totals, totals.slashes_at_budget.at(layer), "slash_mass", "max_slashes");
      row[6] =
          BoundBy(totals, totals.verticals_at_budget.at(layer), "vertical_mass", "max_verticals");
    }
    const auto probed = totals.probed_recall.find(layer);
    if (probed == totals.probed_recall.end()) continue;
    const std::vector<Mean>& heads = probed->second;
    Mean all;
    for (const Mean& head : heads) all.Add(head.value());
    const auto worst = std::ranges::min_element(heads, {}, &Mean::value);
    row[3] = FormatPercent(all.value());
    row[4] = absl::StrCat(worst - heads.begin(), ": ", FormatPercent(worst->value()));
  }
  out << "\n";
  WriteColumns(out, rows, columns);
}

nlohmann::ordered_json ToJson(double loss,
                              const google::protobuf::RepeatedPtrField<v1::TaskAnswers>& answers) {
  nlohmann::ordered_json by_task = nlohmann::ordered_json::object();
  for (const v1::TaskAnswers& task : answers) {
    by_task[task.task()] = {
        {"asked", task.asked()}, {"right", task.right()}, {"loss", task.loss()}};
  }
  return {{"loss", loss}, {"answers", by_task}};
}

// Adds dense losses and answers where training.eval_attention is both.
nlohmann::ordered_json ToJson(const v1::EvalReport& eval) {
  nlohmann::ordered_json json = ToJson(eval.loss(), eval.answers());
  if (eval.has_dense()) json["dense"] = ToJson(eval.dense().loss(), eval.dense().answers());
  return json;
}

double PaddingShare(const Totals& totals) {
  return totals.padding_tokens / (totals.tokens + totals.padding_tokens);
}

nlohmann::ordered_json SamplesToJson(const Totals& totals) {
  return {{"samples", totals.samples},
          {"micro_batches", totals.micro_batches},
          {"padding_tokens", totals.padding_tokens},
          {"padding_share", PaddingShare(totals)},
          {"dealt_imbalance", totals.dealt_imbalance.value()},
          {"overlong_documents", totals.overlong_documents},
          {"overlong_tokens", totals.overlong_tokens}};
}

void AddSampleRows(const Totals& totals, std::vector<std::vector<std::string>>* rows) {
  rows->push_back({"samples", absl::StrFormat("%.0f in %.0f micro-batches", totals.samples,
                                              totals.micro_batches)});
  rows->push_back({"groups as predicted",
                   absl::StrFormat("slowest %.3f of the mean", totals.dealt_imbalance.value())});
  const bool dropped = totals.job.spec().data().overlong() == v1::DataSpec::DROP;
  rows->push_back({"documents too long",
                   absl::StrFormat("%d of %d tokens, %s", totals.overlong_documents,
                                   totals.overlong_tokens, dropped ? "dropped" : "split")});
}

// What the plan of the newest attempt said of a step when it began; 0: nothing.
double PredictedSeconds(const v1::Job& job) {
  return job.attempts().empty() ? 0 : job.attempts().rbegin()->plan().prediction().step_seconds();
}

nlohmann::ordered_json ToJson(const Totals& totals) {
  nlohmann::ordered_json phases = nlohmann::ordered_json::object();
  ForEachPhase(totals.phases,
               [&](const std::string& name, double seconds) { phases[name] = seconds; });
  const v1::Job& job = totals.job;
  nlohmann::ordered_json json = {
      {"name", ShortName(job.name())},
      {"state", v1::Job::State_Name(job.state())},
      {"steps", job.progress().step()},
      {"skipped_steps", totals.skipped},
      {"skipped_at_end", totals.skipped_at_end},
      {"loss_first", totals.loss_first},
      {"loss_last", totals.loss_last},
      {"heldout_first", job.first_eval().loss()},
      {"heldout_last", job.last_eval().loss()},
      {"first_evaluation", ToJson(job.first_eval())},
      {"last_evaluation", ToJson(job.last_eval())},
      {"tokens_per_second", totals.seconds > 0 ? totals.tokens / totals.seconds : 0},
      {"density", totals.density.value()},
      {"density_per_layer", ByLayer(totals.layer_density)},
      {"recall_per_layer", ByLayer(totals.layer_recall)},
      {"probed_recall_per_head", ByHead(totals.probed_recall)},
      {"verticals_at_budget_per_layer", ByLayer(totals.verticals_at_budget)},
      {"slashes_at_budget_per_layer", ByLayer(totals.slashes_at_budget)},
      {"worker_imbalance", totals.worker_imbalance.value()},
      {"step_imbalance", totals.step_imbalance.value()},
      {"ring_imbalance", totals.ring_imbalance.value()},
      {"group_imbalance", totals.group_imbalance.value()},
      {"seconds", totals.seconds},
      {"predicted_step_seconds", PredictedSeconds(job)},
      {"phases_are", "maxima over ranks"},
      {"phases", phases},
      {"model", job.model_directory()}};
  if (totals.head_bytes > 0) json["head_bytes"] = totals.head_bytes;
  if (totals.whole_ring_bytes > 0) {
    json["ring_bytes"] = {{"sent", totals.ring_bytes}, {"whole", totals.whole_ring_bytes}};
  }
  if (totals.balanced > 0) {
    json["balance"] = {{"moved", totals.balanced}, {"anchor_missed", totals.anchor_missed}};
  }
  if (totals.samples > 0) json["samples"] = SamplesToJson(totals);
  if (totals.padding_tokens > 0) {
    json["padding"] = {{"tokens", totals.padding_tokens}, {"share", PaddingShare(totals)}};
  }
  return json;
}

void WriteTable(std::ostream& out, const Totals& totals, int columns) {
  const v1::Job& job = totals.job;
  const auto change = [](double first, double last) {
    return absl::StrFormat("%.4f -> %.4f (%+.1f %%)", first, last,
                           first != 0 ? 100 * (last - first) / first : 0);
  };
  std::vector<std::vector<std::string>> rows = {
      {"job", absl::StrCat(ShortName(job.name()), ", ", v1::Job::State_Name(job.state()))},
      {"steps", absl::StrCat(job.progress().step(), " of ", job.progress().total_steps())},
      {"loss", change(totals.loss_first, totals.loss_last)}};
  if (totals.skipped > 0) {
    rows.push_back(
        {"skipped steps", absl::StrFormat("%d for NaN or infinite gradients, %d of them at the end",
                                          totals.skipped, totals.skipped_at_end)});
  }
  if (job.has_last_eval()) {
    const bool is_one = job.first_eval().step() == job.last_eval().step();
    rows.push_back(
        {"held-out loss", is_one ? absl::StrFormat("%.4f after step %d", job.last_eval().loss(),
                                                   job.last_eval().step())
                                 : change(job.first_eval().loss(), job.last_eval().loss())});
    for (const v1::TaskAnswers& task : job.last_eval().answers()) {
      rows.push_back({absl::StrCat("answers, ", task.task()),
                      absl::StrCat(task.right(), " of ", task.asked(), " right")});
    }
  }
  rows.push_back(
      {"tokens/s", FormatCount(totals.seconds > 0 ? totals.tokens / totals.seconds : 0)});
  if (totals.samples > 0) AddSampleRows(totals, &rows);
  if (totals.padding_tokens > 0) {
    rows.push_back({"padding", absl::StrFormat("%.0f tokens, %s", totals.padding_tokens,
                                               FormatPercent(PaddingShare(totals)))});
  }
  if (totals.balanced > 0) {
    rows.push_back(
        {"balance", absl::StrFormat("%.0f choices moved, %s missed the anchor", totals.balanced,
                                    FormatPercent(totals.anchor_missed / totals.balanced))});
  }
  if (totals.whole_ring_bytes > 0) {
    rows.push_back(
        {"sent around rings",
         absl::StrFormat("%s by all ranks, %s of all keys", FormatBytes(totals.ring_bytes),
                         FormatPercent(totals.ring_bytes / totals.whole_ring_bytes))});
  }
  if (totals.head_bytes > 0) {
    rows.push_back({"sent to share heads", FormatBytes(totals.head_bytes) + " from a rank"});
  }
  rows.push_back({"worker imbalance", absl::StrFormat("%.3f", totals.worker_imbalance.value())});
  rows.push_back({"ring step imbalance", absl::StrFormat("%.3f", totals.step_imbalance.value())});
  if (totals.ring_imbalance.count > 0) {
    rows.push_back({"by layer and ring step",
                    absl::StrFormat("%.3f of ranks, %.3f of groups", totals.ring_imbalance.value(),
                                    totals.group_imbalance.value())});
  }
  if (const double predicted = PredictedSeconds(totals.job); predicted > 0) {
    const double mean = totals.seconds / static_cast<double>(std::max<size_t>(1, totals.steps));
    rows.push_back({"a step", absl::StrFormat("%.4g s, predicted %.4g s (%+.1f %%)", mean,
                                              predicted, 100 * (predicted / mean - 1))});
  }
  ForEachPhase(totals.phases, [&](std::string name, double seconds) {
    std::replace(name.begin(), name.end(), '_', ' ');
    rows.push_back({absl::StrCat("seconds, ", name), absl::StrFormat("%.2f", seconds)});
  });
  rows.push_back({"seconds, all steps", absl::StrFormat("%.2f", totals.seconds)});
  if (!job.model_directory().empty()) rows.push_back({"model", job.model_directory()});
  WriteColumns(out, rows, columns);
  out << "Seconds of a phase are those of the rank that took longest for it in each\n"
         "step, so that phases add up to more than all steps.\n";
  WriteLayers(out, totals, columns);
}

absl::StatusOr<int> Report(const Context& context, const std::string& name) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(context));
  ASSIGN_OR_RETURN(const JobSteps all, ReadSteps(client.get(), name));
  if (all.steps.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        ShortName(all.job.name()), IsTerminal(all.job.state()) ? " ended" : " is",
        " without a step (",
        IsTerminal(all.job.state()) ? "" : absl::StrCat(v1::Job::State_Name(all.job.state()), ": "),
        all.job.state_reason(), "); there is nothing to report"));
  }
  const Totals totals = Sum(all.job, all.steps);
  PrintJson(context, ToJson(totals),
            [&](std::ostream& out) { WriteTable(out, totals, Columns(context)); });
  return kOk;
}

}  // namespace

void AddReportCommand(CLI::App& app, Context* context) {
  auto name = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("report", "sum up a job's steps up to now");
  command->add_option("job", *name, "name of the job")->required();
  command->callback([=] { context->action = [=] { return Report(*context, *name); }; });
}

}  // namespace ringleader::cli
