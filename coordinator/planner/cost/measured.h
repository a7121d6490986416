// What trainers measured of the machines (docs/latency.md), between its messages and what the cost
// model reads.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "balance/latency_table.h"
#include "coordinator/planner/cost/shapes.h"
#include "model_shape/model_config.h"
#include "ringleader/v1/job_spec.pb.h"
#include "ringleader/v1/latency.pb.h"
#include "ringleader/v1/node.pb.h"

namespace ringleader::planner {

// The attention that most layers of a job have.
v1::LatencyShape ShapeOf(const v1::JobSpec& spec, const model::ModelConfig& model);

// What computes on the node for the job, as trainers name it; empty if a job on GPUs finds none.
std::string DeviceOf(const v1::JobSpec& spec, const v1::NodeInventory& node);

// INVALID_ARGUMENT names the row that is none, as in balance::MakeTable().
absl::StatusOr<balance::LatencyTable> TableOf(const v1::LatencyTable& message);
// INVALID_ARGUMENT where no link is so fast or so slow.
absl::Status CheckLink(const v1::LinkSpeed& link);

// What a trainer reports of a `device` and attention of `shape`, with times that grow with density.
// INVALID_ARGUMENT names what no such trainer measures: another device or shape, figures that are
// none, more than a grid holds, or names that are no text.
absl::StatusOr<v1::Measurements> CheckMeasurements(const v1::Measurements& measured,
                                                   const v1::LatencyShape& shape,
                                                   const std::string& device);

// The slowest of the newest tables of `shape` on each of `devices`: no rank gets ahead of the
// others. Empty where there is none. `tables`: newest first.
balance::LatencyTable SlowestTable(const std::vector<v1::LatencyTable>& tables,
                                   const v1::LatencyShape& shape,
                                   const std::vector<std::string>& devices);

// Replaces the links of `cluster` by the newest speeds that were measured on any of `devices`,
// while nothing else ran. Between GPUs of a node hops are as fast as they usually are beside
// attention at most, which leaves NCCL few of its blocks: NVLink alone is three times as fast.
void UseLinks(const std::vector<v1::LinkSpeed>& links, const std::vector<std::string>& devices,
              ClusterShape* cluster);

}  // namespace ringleader::planner
