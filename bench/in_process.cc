#include "bench/in_process.h"

#include <iostream>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "bench/planned_job.h"
#include "worker/trainer/measure/attention_grid.h"

namespace ringleader::bench {

void PrintSettings(const trainer::StepEngine& engine) {
  for (const auto& [name, value] : engine.Settings()) {
    std::cerr << absl::StrFormat("| %s | %s |\n", name, value);
  }
}

absl::StatusOr<bool> MeasureOnce(const std::string& path, const trainer::TrainingJob& job,
                                 const std::string& measured, double seconds,
                                 trainer::StepEngine& engine) {
  ASSIGN_OR_RETURN(const bool is_known, IsMeasured(path, measured));
  if (is_known) return false;
  const QuietHost host;
  const balance::Measurements found = {
      .machine = engine.device().Machine(),
      .rows = trainer::MeasureAttention(job, engine.config(), seconds, engine.device(), host)};
  std::cerr << absl::StrFormat("attention measured at %d points\n", found.rows.size());
  if (!found.rows.empty()) RETURN_IF_ERROR(KeepMeasured(path, found, measured));
  return true;
}

}  // namespace ringleader::bench
