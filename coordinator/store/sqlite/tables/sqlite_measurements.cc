// What trainers measured, and the plans that jobs go by, in SqliteTransaction.
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "coordinator/store/sqlite/sqlite_transaction.h"
#include "proto/timestamps.h"

namespace ringleader::store {
namespace {

// A new driver, build or clock state makes a new machine of a device: the newest are kept, of each
// device and of all together.
constexpr int64_t kKeptOfADevice = 8;
constexpr int64_t kKept = 128;

std::string KeyOf(const v1::MachineKind& machine) {
  return absl::StrJoin({machine.device(), machine.clocks(), machine.driver(), machine.build()},
                       "\n");
}

std::string SubjectOf(const v1::LatencyShape& shape) {
  return absl::StrFormat("%s, tile %d, %d/%d heads of %d", shape.pattern(), shape.tile(),
                         shape.heads(), shape.kv_heads(), shape.head_dim());
}

std::string SubjectOf(const v1::LinkSpeed& link) {
  return link.between_nodes() ? "links between nodes" : "links inside nodes";
}

}  // namespace

absl::Status SqliteTransaction::PutMeasurement(const v1::MachineKind& machine,
                                               const std::string& subject,
                                               const v1::Measurements& measured) {
  return connection_.Try([&]() -> absl::Status {
    const std::string data = Seal(measured.SerializeAsString());
    const std::string key = KeyOf(machine);
    const std::string_view device = machine.device();
    // Later than all there are: the clock may have been ahead when they came.
    connection_.Run(
        "INSERT OR REPLACE INTO measurements (machine, subject, device, time_us, data) VALUES "
        "(?, ?, ?, (SELECT MAX(?, IFNULL(MAX(time_us) + 1, 0)) FROM measurements), ?)",
        std::string_view(key), std::string_view(subject), device,
        absl::ToUnixMicros(options_.clock->Now()), Blob{data});
    connection_.Run(
        "DELETE FROM measurements WHERE device = ? AND subject = ? AND machine NOT IN (SELECT "
        "machine FROM measurements WHERE device = ? AND subject = ? ORDER BY time_us DESC, machine "
        "LIMIT ?)",
        device, std::string_view(subject), device, std::string_view(subject), kKeptOfADevice);
    connection_.Run(
        "DELETE FROM measurements WHERE time_us < (SELECT MIN(time_us) FROM (SELECT time_us FROM "
        "measurements ORDER BY time_us DESC LIMIT ?))",
        kKept);
    wrote_ = true;
    return absl::OkStatus();
  });
}

absl::Status SqliteTransaction::PutMeasurements(const v1::Measurements& measured) {
  google::protobuf::Timestamp now;
  SetTime(options_.clock->Now(), &now);
  if (!measured.layers().rows().empty()) {
    v1::Measurements row;
    *row.mutable_layers() = measured.layers();
    *row.mutable_layers()->mutable_time() = now;
    RETURN_IF_ERROR(
        PutMeasurement(measured.layers().machine(), SubjectOf(measured.layers().shape()), row));
  }
  for (const v1::LinkSpeed& link : measured.links()) {
    v1::Measurements row;
    *row.add_links() = link;
    *row.mutable_links(0)->mutable_time() = now;
    RETURN_IF_ERROR(PutMeasurement(link.machine(), SubjectOf(link), row));
  }
  return absl::OkStatus();
}

absl::StatusOr<MeasurementList> SqliteTransaction::ListMeasurements() {
  return connection_.Try([&]() -> absl::StatusOr<MeasurementList> {
    MeasurementList list;
    Cursor rows = connection_.Query(
        "SELECT device, subject, data FROM measurements ORDER BY time_us DESC, machine, subject");
    while (rows.Next()) {
      v1::Measurements row;
      const absl::Status read =
          Parse(rows.Bytes(2),
                absl::StrCat("what was measured of ", std::string(rows.Bytes(0)), " (",
                             std::string(rows.Bytes(1)), ")"),
                &row);
      if (!read.ok()) {
        list.damaged.push_back(read);
      } else if (row.has_layers()) {
        list.tables.push_back(std::move(*row.mutable_layers()));
      } else {
        list.links.insert(list.links.end(), row.links().begin(), row.links().end());
      }
    }
    return list;
  });
}

absl::StatusOr<std::optional<v1::StepPlan>> SqliteTransaction::GetPlan(std::string_view job) {
  return connection_.Try([&]() -> absl::StatusOr<std::optional<v1::StepPlan>> {
    Cursor row = connection_.Query("SELECT data FROM plans WHERE job = ?", job);
    if (!row.Next()) return std::nullopt;
    v1::StepPlan plan;
    RETURN_IF_ERROR(
        Parse(row.Bytes(0), absl::StrCat("the plan of jobs/", std::string(job)), &plan));
    return plan;
  });
}

}  // namespace ringleader::store
