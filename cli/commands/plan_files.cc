#include "cli/commands/plan_files.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <sstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/files.h"
#include "base/status_macros.h"
#include "cli/jobs/steps.h"
#include "jobspec/jobspec.h"
#include "jobspec/values/probed_recall.h"
#include "ringleader/v1/node_service.pb.h"
#include "ringleader/v1/telemetry.pb.h"
#include "worker/data/samples.h"
#include "worker/data/token_folder.h"

namespace ringleader::cli {
namespace {

using google::protobuf::util::JsonStringToMessage;

// Of which a job's density is the mean, as where the coordinator looks for better shapes.
constexpr size_t kRecentReports = 16;

// Above what a coordinator keeps of a job or of all machines.
constexpr size_t kMaxFileBytes = size_t{256} << 20;

}  // namespace

absl::StatusOr<std::vector<uint64_t>> ReadLengths(const std::string& file) {
  ASSIGN_OR_RETURN(std::string text, ReadFlagFile("--lengths", file, kMaxFileBytes, Pipe::kRead));
  std::istringstream in(std::move(text));
  std::vector<uint64_t> lengths;
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    const absl::string_view entry = absl::StripAsciiWhitespace(line);
    if (entry.empty()) continue;
    uint64_t tokens = 0;
    if (!absl::SimpleAtoi(entry, &tokens) || tokens == 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("--lengths %s:%d: a number of tokens is expected", file, number));
    }
    lengths.push_back(tokens);
  }
  if (lengths.empty()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--lengths %s: holds no length; give one a line", file));
  }
  return lengths;
}

absl::StatusOr<std::vector<uint64_t>> PackedLengths(const v1::DataSpec& spec) {
  ASSIGN_OR_RETURN(const data::TokenFolder folder, data::TokenFolder::Open(spec.train()));
  const data::Overlong overlong = spec.overlong() == v1::DataSpec::SPLIT  ? data::Overlong::kSplit
                                  : spec.overlong() == v1::DataSpec::DROP ? data::Overlong::kDrop
                                                                          : data::Overlong::kRefuse;
  ASSIGN_OR_RETURN(const data::SampleIndex index,
                   data::IndexSamples(folder, spec.train(), spec.sequence_length(), overlong));
  std::vector<uint64_t> lengths;
  for (const data::Sample& sample : index.samples) lengths.push_back(sample.tokens);
  return lengths;
}

absl::StatusOr<v1::ListLatencyResponse> ReadMeasured(const std::string& file) {
  ASSIGN_OR_RETURN(const std::string text,
                   ReadFlagFile("--measured", file, kMaxFileBytes, Pipe::kRead));
  v1::ListLatencyResponse all;
  if (const auto status = JsonStringToMessage(text, &all); !status.ok()) {
    const std::string why(status.message());  // further lines show the place
    return absl::InvalidArgumentError(
        absl::StrFormat("--measured %s: is not what `ringctl latency -o json` prints: %s", file,
                        why.substr(0, why.find('\n'))));
  }
  return all;
}

absl::StatusOr<MeasuredMachine> UseMeasured(const v1::ListLatencyResponse& all,
                                            const std::string& source, const std::string& device,
                                            const v1::JobSpec& spec,
                                            const model::ModelConfig& model,
                                            planner::ClusterShape* cluster) {
  std::set<std::string> known;
  for (const v1::LatencyTable& table : all.tables()) known.insert(table.machine().device());
  for (const v1::LinkSpeed& link : all.links()) known.insert(link.machine().device());
  const auto says = [&](const absl::Status& status) {
    return absl::InvalidArgumentError(absl::StrCat(source, ": ", std::string(status.message())));
  };
  for (const v1::LatencyTable& table : all.tables()) {
    if (const auto read = planner::TableOf(table); !read.ok()) return says(read.status());
  }
  for (const v1::LinkSpeed& link : all.links()) {
    if (const absl::Status sound = planner::CheckLink(link); !sound.ok()) return says(sound);
  }
  if (known.empty()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: nothing had been measured when it was written", source));
  }
  if (device.empty() ? known.size() != 1 : !known.contains(device)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: name one of its devices by --device: \"%s\"", source, absl::StrJoin(known, "\", \"")));
  }
  const std::string name = device.empty() ? *known.begin() : device;
  planner::UseLinks({all.links().begin(), all.links().end()}, {name}, cluster);
  MeasuredMachine machine = {.table =
                                 planner::SlowestTable({all.tables().begin(), all.tables().end()},
                                                       planner::ShapeOf(spec, model), {name})};
  const bool has_rows = !machine.table.rows.empty();
  std::vector<std::string> links;
  for (const v1::LinkSpeed& link : all.links()) {
    if (link.machine().device() != name) continue;
    links.push_back(absl::StrFormat("%s at %.4g GB/s",
                                    link.between_nodes() ? "between nodes" : "inside a node",
                                    link.bytes_per_second() / 1e9));
  }
  machine.text =
      absl::StrFormat("%s as measured: attention of the job's shape %s; links %s", name,
                      has_rows ? absl::StrFormat("at %d points", machine.table.rows.size())
                               : "was not, usual speed",
                      links.empty() ? "were not, usual speed" : absl::StrJoin(links, ", "));
  return machine;
}

absl::StatusOr<JobReports> ReadReports(Client* client, const std::string& name) {
  ASSIGN_OR_RETURN(JobSteps all, ReadSteps(client, name));
  JobReports reports = {.job = std::move(all.job), .hints = {}};
  jobspec::ApplyDefaults(reports.job.mutable_spec());
  std::vector<v1::StepReport> recent;
  for (const auto& [number, step] : all.steps) {
    if (step.step_seconds() > 0) reports.step_seconds.push_back(step.step_seconds());
    if (auto probe = jobspec::ProbedRecallOf(step)) reports.probe = *std::move(probe);
  }
  const auto first = all.steps.size() > kRecentReports ? all.steps.size() - kRecentReports : 0;
  for (auto step = std::next(all.steps.begin(), static_cast<std::ptrdiff_t>(first));
       step != all.steps.end(); ++step) {
    recent.push_back(step->second);
  }
  reports.hints = planner::HintsFrom(reports.job.spec(), recent);
  return reports;
}

absl::StatusOr<std::vector<double>> ReadStepSeconds(const std::string& file) {
  ASSIGN_OR_RETURN(std::string text, ReadFlagFile("--steps", file, kMaxFileBytes, Pipe::kRead));
  std::istringstream in(std::move(text));
  std::vector<double> seconds;
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    v1::StepReport step;
    const auto status = JsonStringToMessage(line, &step);
    if (!status.ok() || !(step.step_seconds() > 0)) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "--steps %s:%d: is no step as `ringctl history JOB -o jsonl` prints them", file, number));
    }
    seconds.push_back(step.step_seconds());
  }
  if (seconds.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat("--steps %s: holds no step", file));
  }
  return seconds;
}

std::string CompareSteps(std::vector<double> seconds, double predicted_seconds) {
  seconds.erase(seconds.begin(), seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 3));
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return absl::StrFormat("%d measured steps took %.4g s (median): predicted %.4g s, %+.1f %%",
                         seconds.size(), *middle, predicted_seconds,
                         100 * (predicted_seconds / *middle - 1));
}

}  // namespace ringleader::cli
