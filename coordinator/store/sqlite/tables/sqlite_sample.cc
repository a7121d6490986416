// Steps and evaluations thinned out for charts: one look-up of the index by (job, step) a point.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/numbers/ceil_div.h"
#include "base/status_macros.h"
#include "coordinator/store/sqlite/sqlite_transaction.h"

namespace ringleader::store {
namespace {

// The first step from `step` on whose report keeps its layers, however old it is.
int64_t NextWithLayers(int64_t step) {
  return RoundUp(step - 1, kLayerStride) + 1;
}

// How to ask one table for a job's first and last step, and for the first row from a step on.
struct Statements {
  const char* ends;
  const char* next;
};

constexpr Statements kSteps = {
    "SELECT IFNULL((SELECT MIN(step) FROM steps WHERE job = ?), -1), (SELECT MAX(step) FROM steps "
    "WHERE job = ?)",
    "SELECT step, data FROM steps WHERE job = ? AND step >= ? ORDER BY step LIMIT 1"};
constexpr Statements kEvals = {
    "SELECT IFNULL((SELECT MIN(step) FROM evals WHERE job = ?), -1), (SELECT MAX(step) FROM evals "
    "WHERE job = ?)",
    "SELECT step, data FROM evals WHERE job = ? AND step >= ? ORDER BY step LIMIT 1"};

int64_t AnyStep(int64_t step) {
  return step;
}

// `parse` makes a report of a row. `next`: the step that is asked for in place of one.
template <typename Report, typename Parse>
absl::StatusOr<std::vector<Report>> Sample(Connection& connection, const Statements& sql,
                                           std::string_view job, int count,
                                           int64_t (*next)(int64_t), const Parse& parse) {
  return connection.Try([&]() -> absl::StatusOr<std::vector<Report>> {
    int64_t first = -1, last = 0;
    {
      Cursor ends = connection.Query(sql.ends, job, job);
      ends.Next();
      first = ends.Int(0);  // -1: there are none
      last = ends.Int(1);
    }
    std::vector<Report> reports;
    int64_t newest = -1;  // that was taken
    for (int i = 0; first >= 0 && i < count; ++i) {
      const int64_t from = std::min(last, next(first + (last - first) * i / (count - 1)));
      if (from <= newest) continue;
      Cursor row = connection.Query(sql.next, job, from);
      if (!row.Next()) break;
      newest = row.Int(0);
      RETURN_IF_ERROR(parse(row.Bytes(1), &reports.emplace_back()));
    }
    return reports;
  });
}

}  // namespace

absl::StatusOr<std::vector<v1::StepReport>> SqliteTransaction::SampleSteps(std::string_view job,
                                                                           int count) {
  return Sample<v1::StepReport>(
      connection_, kSteps, job, count, &AnyStep, [&](std::string_view row, v1::StepReport* report) {
        RETURN_IF_ERROR(Parse(row, absl::StrCat("jobs/", std::string(job), ", steps"), report));
        // Clear() would keep their memory.
        google::protobuf::RepeatedPtrField<v1::LayerReport>().Swap(report->mutable_layers());
        google::protobuf::RepeatedField<uint64_t>().Swap(report->mutable_rank_tiles());
        google::protobuf::RepeatedField<float>().Swap(report->mutable_rank_paces());
        return absl::OkStatus();
      });
}

absl::Status SqliteTransaction::VisitStepsWithLayers(
    std::string_view job, int count, absl::FunctionRef<void(const v1::StepReport&)> visit) {
  struct Visited {};
  v1::StepReport report;
  return Sample<Visited>(connection_, kSteps, job, count, &NextWithLayers,
                         [&](std::string_view row, Visited*) {
                           RETURN_IF_ERROR(Parse(
                               row, absl::StrCat("jobs/", std::string(job), ", steps"), &report));
                           visit(report);
                           return absl::OkStatus();
                         })
      .status();
}

absl::StatusOr<std::vector<v1::EvalReport>> SqliteTransaction::SampleEvals(std::string_view job,
                                                                           int count) {
  return Sample<v1::EvalReport>(
      connection_, kEvals, job, count, &AnyStep, [&](std::string_view row, v1::EvalReport* report) {
        return Parse(row, absl::StrCat("jobs/", std::string(job), ", evaluations"), report);
      });
}

}  // namespace ringleader::store
