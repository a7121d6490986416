#include "cli/plan_text.h"

#include <ostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/printer.h"
#include "jobspec/jobspec.h"
#include "jobspec/text.h"

namespace ringleader::cli {

void WritePlan(std::ostream& out, const v1::StepPlan& plan) {
  std::string layout = jobspec::EnumText(plan.layout());
  if (plan.stripe() > 0) absl::StrAppend(&layout, ", stripes of ", plan.stripe(), " tokens");
  std::string ring = jobspec::EnumText(plan.ring().kind());
  if (plan.ring().outer() > 1) {
    absl::StrAppend(&ring, ", ", plan.ring().outer(), " nodes × ", plan.ring().inner());
  } else {
    absl::StrAppend(&ring, " of ", plan.ring().inner());
  }
  std::vector<std::vector<std::string>> rows = {{"layout", layout}, {"ring", ring}};
  if (plan.has_prediction()) {
    const v1::Prediction& p = plan.prediction();
    const auto share = [&](double seconds) {
      return absl::StrFormat("%.4g s (%s of the step)", seconds,
                             FormatPercent(p.step_seconds() > 0 ? seconds / p.step_seconds() : 0));
    };
    rows.push_back({"step", absl::StrFormat("%.4g s", p.step_seconds())});
    rows.push_back({"tokens/s", FormatCount(p.tokens_per_second())});
    rows.push_back({"attention", share(p.attention_seconds())});
    rows.push_back({"linear", share(p.linear_seconds())});
    rows.push_back(
        {"communication", absl::StrFormat("%.4g s, hidden or not", p.communication_seconds())});
    rows.push_back({"exposed communication", share(p.exposed_communication_seconds())});
    rows.push_back({"worker imbalance", absl::StrFormat("%.3f (max/mean)", p.worker_imbalance())});
    rows.push_back({"ring step imbalance", absl::StrFormat("%.3f (max/mean)", p.step_imbalance())});
    rows.push_back({"density", FormatPercent(p.density())});
  }
  WriteColumns(out, rows);
  for (const std::string& reason : plan.reasons())
    out << "- " << jobspec::EscapeControls(reason) << "\n";
}

}  // namespace ringleader::cli
