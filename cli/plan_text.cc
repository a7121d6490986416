#include "cli/plan_text.h"

#include <algorithm>
#include <numeric>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/printer.h"
#include "jobspec/fields/text.h"
#include "jobspec/jobspec.h"
#include "jobspec/values/attention_spec.h"

namespace ringleader::cli {

namespace {

// Dense bf16 products of an H100 or H200, a second (NVIDIA's data sheets).
constexpr double kHopperFlops = 989e12;
// Less is what rounding leaves of sums that are even.
constexpr double kNothingSeconds = 1e-9;

// What the model itself takes for a step; what is computed again does not count.
std::string Arithmetic(const v1::Prediction& p, const v1::ResourcesSpec& resources) {
  const double each = p.model_flops() / p.step_seconds() / std::max(1u, resources.trainers());
  std::string rate = absl::StrFormat("%.4g TFLOP/s a trainer", each / 1e12);
  if (resources.engine() != v1::ResourcesSpec::CUDA) return rate;
  return absl::StrFormat("%s, MFU %s of a Hopper's 989", rate, FormatPercent(each / kHopperFlops));
}

// By layer: the mean over its heads, and each of them.
void WriteProbe(std::ostream& out, const v1::ProbedRecall& probe) {
  constexpr int kHeadsOfARow = 16;
  std::vector<std::vector<std::string>> rows = {{"LAYER", "RECALL", "OF HEADS, IN PERCENT"}};
  for (const v1::ProbedLayer& layer : probe.layers()) {
    const auto& heads = layer.by_head();
    const double mean = std::accumulate(heads.begin(), heads.end(), 0.0) / heads.size();
    for (int head = 0; head < heads.size(); ++head) {
      if (head == 0) {
        rows.push_back({absl::StrCat(layer.layer()), FormatPercent(mean), ""});
      } else if (head % kHeadsOfARow == 0) {
        rows.push_back({"", "", ""});
      }
      absl::StrAppendFormat(&rows.back()[2], "%s%.0f", head % kHeadsOfARow == 0 ? "" : " ",
                            100 * heads[head]);
    }
  }
  out << "\nattention mass kept, by the probe of step " << probe.step() << "\n";
  WriteColumns(out, rows);
}

}  // namespace

std::string LayoutText(const v1::StepPlan& plan) {
  std::string text = jobspec::EnumText(plan.layout());
  if (plan.stripe() > 0) absl::StrAppend(&text, ", stripes of ", plan.stripe(), " tokens");
  return text;
}

std::string RingText(const v1::StepPlan& plan) {
  const std::string kind = jobspec::EnumText(plan.ring().kind());
  if (plan.ring().outer() > 1) {
    return absl::StrCat(kind, ", ", plan.ring().outer(), " inner rings of ", plan.ring().inner());
  }
  const std::string groups =
      plan.head_groups() > 1 ? absl::StrCat(", ", plan.head_groups(), " groups of heads") : "";
  return absl::StrCat(kind, " of ", plan.ring().inner(), groups);
}

void WritePlan(std::ostream& out, const v1::JobSpec& spec, const v1::StepPlan& plan, int columns) {
  std::vector<std::vector<std::string>> rows = {{"layout", LayoutText(plan)},
                                                {"ring", RingText(plan)}};
  const uint32_t heads = jobspec::HeadRanks(jobspec::PlannedJob(spec, plan).parallelism());
  if (heads > 1) {
    rows.push_back(
        {"heads", absl::StrCat("shared out among ", heads, " trainers, ring around them")});
  }
  if (plan.has_prediction()) {
    const v1::Prediction& p = plan.prediction();
    const auto share = [&](double exact) {
      const double seconds = exact < kNothingSeconds ? 0 : exact;
      return absl::StrFormat("%.4g s (%s of the step)", seconds,
                             FormatPercent(p.step_seconds() > 0 ? seconds / p.step_seconds() : 0));
    };
    rows.push_back({"step", absl::StrFormat("%.4g s, of which", p.step_seconds())});
    rows.push_back({"attention", share(p.attention_seconds())});
    rows.push_back({"index", share(p.index_seconds())});
    rows.push_back({"linear", share(p.linear_seconds())});
    rows.push_back({"waits for other ranks", share(p.wait_seconds())});
    rows.push_back({"exposed communication", share(p.exposed_communication_seconds())});
    rows.push_back({"gradients, optimizer",
                    absl::StrFormat("%s, %.4g s of it exchange", share(p.optimizer_seconds()),
                                    p.exchange_seconds())});
    rows.push_back({"tokens/s", absl::StrFormat("%s, %s a day", FormatCount(p.tokens_per_second()),
                                                FormatCount(86400 * p.tokens_per_second()))});
    rows.push_back({"arithmetic", Arithmetic(p, spec.resources())});
    rows.push_back(
        {"memory of a trainer",
         absl::StrFormat("%s or more", FormatBytes(static_cast<double>(p.memory_bytes())))});
    rows.push_back({"ring's communication",
                    absl::StrFormat("%.4g s, hidden or not", p.communication_seconds())});
    if (heads > 1) {
      rows.push_back(
          {"heads' communication", absl::StrFormat("%.4g s of the ring's, %s from a trainer",
                                                   p.head_seconds(), FormatBytes(p.head_bytes()))});
    }
    rows.push_back({"worker imbalance", absl::StrFormat("%.3f (max/mean)", p.worker_imbalance())});
    rows.push_back({"ring step imbalance", absl::StrFormat("%.3f (max/mean)", p.step_imbalance())});
    rows.push_back({"density", FormatPercent(p.density())});
    if (spec.data().batching() == v1::DataSpec::SAMPLES) {
      rows.push_back(
          {"samples",
           p.sampled_steps() > 0
               ? absl::StrFormat("mean of %d steps of their lengths, dealt to "
                                 "max/mean %.3f",
                                 p.sampled_steps(), p.dealt_imbalance())
               : absl::StrFormat("each taken to have %d tokens", spec.data().sequence_length())});
    }
  }
  WriteColumns(out, rows);
  if (plan.prediction().has_probed_recall()) WriteProbe(out, plan.prediction().probed_recall());
  WriteNotes(out, {plan.reasons().begin(), plan.reasons().end()}, columns);
}

}  // namespace ringleader::cli
