#include "coordinator/planner/cost/measured.h"

#include <algorithm>
#include <limits>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "base/text/controls.h"
#include "google/protobuf/util/message_differencer.h"
#include "jobspec/fields/text.h"
#include "jobspec/values/attention_spec.h"
#include "patterns/pattern.h"

namespace ringleader::planner {
namespace {

using google::protobuf::util::MessageDifferencer;

// More than a grid holds, and than a record of the store should.
constexpr int kMostRows = 256;
constexpr int kMostLinks = 2;
constexpr size_t kMostNameBytes = 128;
constexpr double kMostBytesPerSecond = 1e14;
constexpr double kMostLatencySeconds = 60;

absl::Status CheckNames(const v1::MachineKind& machine, const std::string& device) {
  if (device.empty() || machine.device() != device) {
    return absl::InvalidArgumentError(
        device.empty()
            ? "its node has no such device"
            : absl::StrFormat("its node has \"%s\", and it measured something else", device));
  }
  for (const std::string* name : {&machine.clocks(), &machine.driver(), &machine.build()}) {
    if (name->size() > kMostNameBytes || HasControls(*name))
      return absl::InvalidArgumentError("the name of a driver, build or clock state is no text");
  }
  return absl::OkStatus();
}

void PutRows(const balance::LatencyTable& table, v1::LatencyTable* message) {
  message->clear_rows();
  for (const balance::Row& row : table.rows) {
    v1::LatencyRow* const out = message->add_rows();
    out->set_tokens(static_cast<uint64_t>(row.tokens));
    out->set_document_tokens(static_cast<uint64_t>(row.document_tokens));
    out->set_density(row.density);
    out->set_p50_ms(row.p50_ms);
    out->set_p90_ms(row.p90_ms);
    out->set_forward_p50_ms(row.forward_p50_ms);
  }
}

}  // namespace

absl::Status CheckLink(const v1::LinkSpeed& link) {
  const bool is_speed =
      link.bytes_per_second() > 0 && link.bytes_per_second() <= kMostBytesPerSecond;
  const bool is_latency =
      link.latency_seconds() >= 0 && link.latency_seconds() <= kMostLatencySeconds;
  if (is_speed && is_latency) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "no link has %g bytes a second after %g s", link.bytes_per_second(), link.latency_seconds()));
}

v1::LatencyShape ShapeOf(const v1::JobSpec& spec, const model::ModelConfig& model) {
  v1::LatencyShape shape;
  // PatternDefinition::name in capitals, where MakePlan() refuses the options.
  std::string pattern =
      absl::AsciiStrToLower(v1::AttentionSpec::Pattern_Name(spec.attention().pattern()));
  if (const auto options = jobspec::AttentionOptionsOf(spec.attention());
      options.ok() && model.known()) {
    pattern = patterns::MeasuredName(*options, model.heads, model.kv_heads);
  }
  // What was measured is causal attention: other masks are not found there.
  const v1::AttentionSpec::Mask mask = spec.attention().mask();
  if (mask != v1::AttentionSpec::MASK_UNSPECIFIED && mask != v1::AttentionSpec::MASK_CAUSAL) {
    absl::StrAppend(&pattern, ", ", v1::AttentionSpec::Mask_Name(mask));
  }
  shape.set_pattern(pattern);
  shape.set_tile(spec.attention().tile());
  shape.set_heads(static_cast<uint32_t>(model.heads));
  shape.set_kv_heads(static_cast<uint32_t>(model.kv_heads));
  shape.set_head_dim(static_cast<uint32_t>(model.head_dim));
  return shape;
}

std::string DeviceOf(const v1::JobSpec& spec, const v1::NodeInventory& node) {
  if (spec.resources().engine() == v1::ResourcesSpec::CUDA)
    return node.gpus().empty() ? "" : node.gpus(0).model();
  const uint32_t slots = std::max(1u, node.trainers());
  const uint32_t threads = spec.resources().threads() != 0 ? spec.resources().threads()
                                                           : std::max(1u, node.cpu_cores() / slots);
  return absl::StrFormat("cpu, %d threads", threads);
}

absl::StatusOr<balance::LatencyTable> TableOf(const v1::LatencyTable& message) {
  std::vector<balance::Row> rows;
  for (const v1::LatencyRow& row : message.rows()) {
    rows.push_back({.pattern = message.shape().pattern(),
                    .tile = static_cast<int>(message.shape().tile()),
                    .heads = static_cast<int>(message.shape().heads()),
                    .kv_heads = static_cast<int>(message.shape().kv_heads()),
                    .head_dim = static_cast<int>(message.shape().head_dim()),
                    .tokens = static_cast<int64_t>(row.tokens()),
                    .document_tokens = static_cast<int64_t>(row.document_tokens()),
                    .density = row.density(),
                    .p50_ms = row.p50_ms(),
                    .p90_ms = row.p90_ms(),
                    .forward_p50_ms = row.forward_p50_ms()});
  }
  return balance::MakeTable(std::move(rows));
}

absl::StatusOr<v1::Measurements> CheckMeasurements(const v1::Measurements& measured,
                                                   const v1::LatencyShape& shape,
                                                   const std::string& device) {
  v1::Measurements checked = measured;
  if (measured.layers().rows_size() > kMostRows || measured.links_size() > kMostLinks)
    return absl::InvalidArgumentError("it has more rows than a trainer measures");
  if (!measured.layers().rows().empty()) {
    RETURN_IF_ERROR(CheckNames(measured.layers().machine(), device));
    if (!MessageDifferencer::Equals(measured.layers().shape(), shape))
      return absl::InvalidArgumentError("it is of other attention than the job's");
    ASSIGN_OR_RETURN(const balance::LatencyTable table, TableOf(measured.layers()));
    PutRows(table, checked.mutable_layers());
  }
  for (const v1::LinkSpeed& link : measured.links()) {
    RETURN_IF_ERROR(CheckNames(link.machine(), device));
    RETURN_IF_ERROR(CheckLink(link));
  }
  return checked;
}

balance::LatencyTable SlowestTable(const std::vector<v1::LatencyTable>& tables,
                                   const v1::LatencyShape& shape,
                                   const std::vector<std::string>& devices) {
  // Where machines are compared; which is slower hardly depends on it.
  constexpr double kTokens = 131072, kDensity = 0.1;
  balance::LatencyTable slowest;
  for (size_t i = 0; i < devices.size(); ++i) {
    if (std::find(devices.begin(), devices.begin() + i, devices[i]) != devices.begin() + i)
      continue;
    for (const v1::LatencyTable& message : tables) {
      if (message.machine().device() != devices[i] ||
          !MessageDifferencer::Equals(message.shape(), shape)) {
        continue;
      }
      // Checked before it was stored, and sealed since.
      absl::StatusOr<balance::LatencyTable> table = TableOf(message);
      if (!table.ok()) continue;
      if (table->Predict(kTokens, kDensity) > slowest.Predict(kTokens, kDensity)) {
        slowest = *std::move(table);
      }
      break;
    }
  }
  return slowest;
}

void UseLinks(const std::vector<v1::LinkSpeed>& links, const std::vector<std::string>& devices,
              ClusterShape* cluster) {
  for (const bool between : {false, true}) {
    const auto found = std::find_if(links.begin(), links.end(), [&](const v1::LinkSpeed& link) {
      return link.between_nodes() == between &&
             std::find(devices.begin(), devices.end(), link.machine().device()) != devices.end();
    });
    if (found == links.end()) continue;
    Link& link = between ? cluster->inter_node : cluster->intra_node;
    const bool is_bounded = !between && cluster->engine == v1::ResourcesSpec::CUDA;
    const double most =
        is_bounded ? link.bytes_per_second : std::numeric_limits<double>::infinity();
    link = {.bytes_per_second = std::min(found->bytes_per_second(), most),
            .latency_seconds = found->latency_seconds()};
  }
}

}  // namespace ringleader::planner
