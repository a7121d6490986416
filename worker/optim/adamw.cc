#include "worker/optim/adamw.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace ringleader::optim {
namespace {

// In fp64, as a float sum over a large shard would lose the small gradients.
double SumOfSquares(const std::vector<float>& values) {
  // Independent partial sums let the compiler use vector registers; their order is fixed.
  constexpr size_t kLanes = 16;
  double partial[kLanes] = {};
  for (size_t i = 0; i + kLanes <= values.size(); i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      partial[lane] += static_cast<double>(values[i + lane]) * values[i + lane];
    }
  }
  double sum = 0.0;
  for (const double value : partial) sum += value;
  return sum;
}

}  // namespace

AdamW::AdamW(const AdamWOptions& options, const model::ParameterLayout& layout,
             comm::Communicator& comm, const float* parameters)
    : options_(options), comm_(comm) {
  // Moments start at zero; bias correction makes up for that.
  const int64_t elements = layout.ShardElements(comm.size());
  shard_.begin = elements * comm.rank();
  shard_.master.assign(parameters + shard_.begin, parameters + shard_.begin + elements);
  shard_.first_moment.assign(elements, 0.0f);
  shard_.second_moment.assign(elements, 0.0f);
  gradient_.resize(elements);
  for (const model::ParameterSlot& slot : layout.slots) {
    // A shard's border may run through a matrix: keep the part of it that lies here.
    const int64_t begin = std::max(slot.offset - shard_.begin, int64_t{0});
    const int64_t end = std::min(slot.offset + slot.elements - shard_.begin, elements);
    if (slot.is_matrix() && begin < end) decayed_.push_back({begin, end});
  }
}

absl::StatusOr<OptimizerStep> AdamW::Step(double learning_rate, const float* gradients,
                                          float* parameters) {
  // Each rank receives the sum over ranks of its own range only.
  RETURN_IF_ERROR(comm_.ReduceScatterSum(comm::Channel::kGradients, gradients, gradient_.size(),
                                         gradient_.data()));
  double squares = SumOfSquares(gradient_);
  RETURN_IF_ERROR(comm_.AllReduceSum(comm::Channel::kGradients, &squares, 1));
  // Every rank holds the same sum, so all of them skip or none does.
  OptimizerStep step{.gradient_norm = std::sqrt(squares)};
  if (!std::isfinite(step.gradient_norm)) {
    step.skipped = true;
    return step;
  }

  // Clipping is folded into the update as a factor, and bias correction into rate and root.
  ++updates_;
  const bool clip = options_.clip_norm > 0.0 && step.gradient_norm > options_.clip_norm;
  const auto scale = static_cast<float>(clip ? options_.clip_norm / step.gradient_norm : 1.0);
  const double correction1 = 1.0 - std::pow(options_.beta1, static_cast<double>(updates_));
  const double correction2 = 1.0 - std::pow(options_.beta2, static_cast<double>(updates_));
  const auto rate = static_cast<float>(learning_rate / correction1);
  const auto root2 = static_cast<float>(1.0 / std::sqrt(correction2));
  const auto beta1 = static_cast<float>(options_.beta1), beta2 = static_cast<float>(options_.beta2);
  const auto epsilon = static_cast<float>(options_.epsilon);
  // Decay is decoupled from the gradient: weights shrink by it before the update.
  const auto kept = static_cast<float>(1.0 - learning_rate * options_.weight_decay);

  float* master = shard_.master.data();
  float* first = shard_.first_moment.data();
  float* second = shard_.second_moment.data();
  const float* gradient = gradient_.data();
  for (const Range& range : decayed_) {
    for (int64_t i = range.begin; i < range.end; ++i) master[i] *= kept;
  }
  const int64_t elements = shard_.elements();
  for (int64_t i = 0; i < elements; ++i) {
    const float g = gradient[i] * scale;
    first[i] = beta1 * first[i] + (1.0f - beta1) * g;
    second[i] = beta2 * second[i] + (1.0f - beta2) * g * g;
    master[i] -= rate * first[i] / (std::sqrt(second[i]) * root2 + epsilon);
  }
  RETURN_IF_ERROR(GatherParameters(parameters));
  return step;
}

absl::Status AdamW::Restore(OptimizerShard shard, int64_t updates, float* parameters) {
  if (shard.begin != shard_.begin || shard.elements() != shard_.elements() ||
      shard.first_moment.size() != shard.master.size() ||
      shard.second_moment.size() != shard.master.size()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "optimizer state for elements [%d, %d) does not fit rank %d, which holds [%d, %d)",
        shard.begin, shard.begin + shard.elements(), comm_.rank(), shard_.begin,
        shard_.begin + shard_.elements()));
  }
  // The parameters are not in the checkpoint a second time: master weights are what they were
  // gathered from.
  shard_ = std::move(shard);
  updates_ = updates;
  return GatherParameters(parameters);
}

absl::Status AdamW::GatherParameters(float* parameters) {
  return comm_.AllGather(comm::Channel::kGradients, shard_.master.data(),
                         shard_.master.size() * sizeof(float), parameters);
}

}  // namespace ringleader::optim
