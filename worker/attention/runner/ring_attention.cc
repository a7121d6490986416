#include "worker/attention/runner/ring_attention.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "patterns/check_options.h"

namespace ringleader::attention {

namespace {

using torch::Tensor;

void Check(const absl::Status& status) {
  TORCH_CHECK(status.ok(), "attention: ", std::string(status.message()));
}

// An exchange of heads, in the time of `phase`.
template <typename Exchange>
void CheckExchange(TensorDevice& device, double AttentionSeconds::*phase, Exchange exchange) {
  Check(device.device().Begin(phase));
  Check(exchange());
  Check(device.device().End());
}

// The tensors of a pass of one of `groups` groups of heads, all of them where there is one.
CallTensors GroupOf(const CallTensors& all, int group, int groups) {
  if (groups == 1) return all;
  const auto part = [&](const Tensor& x, int64_t heads_dimension) {
    if (!x.defined()) return x;
    const int64_t heads = x.size(heads_dimension) / groups;
    return x.narrow(heads_dimension, group * heads, heads);
  };
  return {.q = part(all.q, 1),
          .k = part(all.k, 1),
          .v = part(all.v, 1),
          .out = part(all.out, 1),
          .lse = part(all.lse, 0),
          .d_out = part(all.d_out, 1),
          .first_head = all.q.defined() ? static_cast<int>(all.q.size(1) / groups) * group : 0};
}

// A pass over the groups of heads, one after the other: `run` makes the call of one, while the keys
// and values of the next, null after the last, travel. Returns the groups' tensors.
template <typename Run>
absl::StatusOr<std::vector<CallTensors>> VisitGroups(TensorDevice& device, int layer,
                                                     const CallTensors& all, int groups, Run run) {
  std::vector<CallTensors> parts;
  for (int group = 0; group < groups; ++group) parts.push_back(GroupOf(all, group, groups));
  std::unique_ptr<AttentionCall> call = device.Call(layer, &parts[0]);
  for (int group = 0; group < groups; ++group) {
    std::unique_ptr<AttentionCall> next;
    if (group + 1 < groups) next = device.Call(layer, &parts[group + 1]);
    RETURN_IF_ERROR(run(group, *call, next.get()));
    call = std::move(next);
  }
  return parts;
}

// What the groups have found, of all heads again.
Tensor Join(const std::vector<CallTensors>& parts, Tensor CallTensors::*tensor, int64_t dimension) {
  if (parts.size() == 1) return parts[0].*tensor;
  std::vector<Tensor> tensors;
  for (const CallTensors& part : parts) tensors.push_back(part.*tensor);
  return torch::cat(tensors, dimension);
}
Tensor Join(const std::vector<CallTensors>& parts, Tensor AttentionGradients::*gradient) {
  if (parts.size() == 1) return parts[0].gradients.*gradient;
  std::vector<Tensor> tensors;
  for (const CallTensors& part : parts) tensors.push_back(part.gradients.*gradient);
  return torch::cat(tensors, 1);
}

}  // namespace

absl::StatusOr<RingAttention::Indices> RingAttention::AttendGroups(Engine& engine, int layer,
                                                                   CallTensors* tensors) {
  Indices indices;
  ASSIGN_OR_RETURN(
      const std::vector<CallTensors> parts,
      VisitGroups(*engine.device, layer, *tensors, engine.options.head_groups,
                  [&](int /*group*/, AttentionCall& call, AttentionCall* next) -> absl::Status {
                    ASSIGN_OR_RETURN(indices.emplace_back(), engine.runner->Forward(call, next));
                    return absl::OkStatus();
                  }));
  if (parts.size() == 1) tensors->cast = parts[0].cast;
  tensors->out = Join(parts, &CallTensors::out, 1);
  tensors->lse = Join(parts, &CallTensors::lse, 0);
  return indices;
}

absl::Status RingAttention::GroupsBackward(Engine& engine, int layer, const Indices& indices,
                                           CallTensors* tensors) {
  ASSIGN_OR_RETURN(const std::vector<CallTensors> parts,
                   VisitGroups(*engine.device, layer, *tensors, engine.options.head_groups,
                               [&](int group, AttentionCall& call, AttentionCall* next) {
                                 return engine.runner->Backward(*indices[group], call, next);
                               }));
  tensors->gradients = {.dq = Join(parts, &AttentionGradients::dq),
                        .dk = Join(parts, &AttentionGradients::dk),
                        .dv = Join(parts, &AttentionGradients::dv)};
  return absl::OkStatus();
}

class RingAttention::Record : public AttentionRecord {
 public:
  Record(std::shared_ptr<Engine> engine, int layer, Indices indices)
      : engine_(std::move(engine)), layer_(layer), indices_(std::move(indices)) {}

  void StartBackward(const Tensor& k, const Tensor& v) const override {
    const torch::NoGradGuard no_grad;
    TensorDevice& device = *engine_->device;
    CallTensors tensors{.k = device.Take("k", k), .v = device.Take("v", v)};
    if (!engine_->heads.has_value()) {
      CallTensors first = GroupOf(tensors, 0, engine_->options.head_groups);
      return Check(engine_->runner->StartBackward(*indices_[0], *device.Call(layer_, &first)));
    }
    TORCH_CHECK(started_.empty(), "attention: a backward has been started and not been called");
    CheckExchange(device, &AttentionSeconds::backward, [&]() -> absl::Status {
      ASSIGN_OR_RETURN(started_, engine_->heads->Start({tensors.k, tensors.v}));
      return absl::OkStatus();
    });
  }

  AttentionGradients Backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                              const Tensor& lse, const Tensor& d_out) const override {
    const torch::NoGradGuard no_grad;
    TensorDevice& device = *engine_->device;
    CallTensors tensors{.q = device.Take("q", q),
                        .k = device.Take("k", k),
                        .v = device.Take("v", v),
                        .out = device.Take("out", out),
                        .lse = lse,
                        .d_out = device.Take("the gradient of out", d_out)};
    std::optional<SharedHeads>& heads = engine_->heads;
    if (heads.has_value()) {
      if (started_.empty()) StartBackward(tensors.k, tensors.v);
      CheckExchange(device, &AttentionSeconds::backward, [&]() -> absl::Status {
        RETURN_IF_ERROR(heads->ToHeads({&tensors.q, &tensors.out, &tensors.d_out}));
        return SharedHeads::Await(std::exchange(started_, {}), {&tensors.k, &tensors.v});
      });
    }
    Check(GroupsBackward(*engine_, layer_, indices_, &tensors));
    if (heads.has_value()) {
      auto& [dq, dk, dv] = tensors.gradients;
      CheckExchange(device, &AttentionSeconds::backward, [&] {
        return heads->ToTokens({{&dq, q.size(1)}, {&dk, k.size(1)}, {&dv, v.size(1)}});
      });
    }
    return tensors.gradients;
  }

 private:
  const std::shared_ptr<Engine> engine_;
  const int layer_;
  const Indices indices_;
  // Keys and values on their way to the ranks that attend with their heads.
  mutable SharedHeads::Started started_;
};

absl::StatusOr<std::unique_ptr<RingAttention>> RingAttention::Create(
    const patterns::AttentionOptions& options, std::unique_ptr<TensorDevice> device) {
  auto engine = std::make_shared<Engine>();
  engine->options = options;
  engine->device = std::move(device);
  HeadExchange* const heads = engine->device->heads();
  if (heads != nullptr) engine->heads.emplace(heads);
  if (const int ranks = heads == nullptr ? 1 : heads->ranks(); ranks != options.head_ranks) {
    return absl::InvalidArgumentError(
        absl::StrFormat("parallelism.heads: %d, over %d ranks", options.head_ranks, ranks));
  }
  ASSIGN_OR_RETURN(engine->runner, RingRunner::Create(options, &engine->device->device()));
  return std::unique_ptr<RingAttention>(new RingAttention(std::move(engine)));
}

AttentionOutput RingAttention::Forward(int layer, const Tensor& q, const Tensor& k,
                                       const Tensor& v) {
  const torch::NoGradGuard no_grad;
  TensorDevice& device = *engine_->device;
  CallTensors tensors{.q = device.Take("q", q), .k = device.Take("k", k), .v = device.Take("v", v)};
  TORCH_CHECK(k.sizes() == v.sizes() && k.size(0) == q.size(0) && k.size(2) == q.size(2),
              "attention: q ", q.sizes(), ", k ", k.sizes(), " and v ", v.sizes(),
              " do not belong together");
  std::optional<SharedHeads>& heads = engine_->heads;
  Check(patterns::CheckHeads(engine_->options, q.size(1), k.size(1)));
  if (heads.has_value()) {
    CheckExchange(device, &AttentionSeconds::forward, [&] {
      return heads->ToHeads({&tensors.q, &tensors.k, &tensors.v});
    });
  }
  tensors.cast.is_wanted = casts_ && !heads.has_value();  // a token's heads are all here
  absl::StatusOr<Indices> indices = AttendGroups(*engine_, layer, &tensors);
  Check(indices.status());
  if (heads.has_value()) {
    CheckExchange(device, &AttentionSeconds::forward, [&] {
      return heads->ToTokens({{&tensors.out, q.size(1)}});
    });
  }
  return {.out = tensors.out,
          .codes = tensors.cast.codes,
          .scales = tensors.cast.scales,
          .lse = tensors.lse,
          .record = std::make_shared<Record>(engine_, layer, *std::move(indices))};
}

void RingAttention::StartForward(int layer, const Tensor& k, const Tensor& v) {
  const torch::NoGradGuard no_grad;
  TensorDevice& device = *engine_->device;
  TORCH_CHECK(!engine_->heads.has_value(),
              "attention: forward cannot be started ahead where heads are shared out");
  CallTensors first = GroupOf({.k = device.Take("k", k), .v = device.Take("v", v)}, 0,
                              engine_->options.head_groups);
  Check(engine_->runner->StartForward(*device.Call(layer, &first)));
}

void RingAttention::SetDense(bool dense) {
  engine_->runner->SetDense(dense);
}

absl::Status RingAttention::SetDocuments(int64_t tokens, std::span<const int64_t> firsts,
                                         int64_t padding, std::span<const int64_t> prefix_ends) {
  return engine_->runner->SetDocuments(tokens, firsts, padding, prefix_ends);
}

absl::Status RingAttention::SetVisible(std::span<const kernels::KeyIntervals> queries) {
  return engine_->runner->SetVisible(queries);
}

absl::Status RingAttention::SetLayout(const ring::DocumentLayout& layout) {
  return engine_->runner->SetSpread(layout);
}

void RingAttention::SetStep(uint64_t step) {
  engine_->runner->SetStep(step);
}

void RingAttention::SetMove(float factor) {
  engine_->runner->SetMove(factor);
}

void RingAttention::SetHeadBudgets(std::span<const patterns::LayerBudgets> layers) {
  engine_->runner->SetHeadBudgets(layers);
}

void RingAttention::MarkMicroBatch() {
  engine_->runner->MarkMicroBatch();
}

AttentionStats RingAttention::TakeStats() {
  AttentionStats stats = engine_->runner->TakeStats();
  if (!engine_->heads.has_value()) return stats;
  stats.head_bytes = engine_->heads->TakeBytes();
  for (LayerStats& layer : stats.layers) {
    layer.first_head = engine_->heads->rank() * static_cast<int>(layer.probed_recall.size());
  }
  return stats;
}

}  // namespace ringleader::attention
