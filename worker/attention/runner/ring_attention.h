// ContextAttention over the ranks that share a sequence, on any device: RingRunner between
// LibTorch's tensors. Where heads are shared out, tensors are exchanged before the ring and after
// it; all exchanges of a pass are under way together, and those of keys and values for backward
// while the caller computes something else. Where heads are attended with in groups, each group is
// a call of its own, and the keys of the next one travel during it.
#pragma once

#include <torch/types.h>

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "patterns/attention_options.h"
#include "worker/attention/heads/shared_heads.h"
#include "worker/attention/runner/attention_device.h"
#include "worker/attention/runner/context_attention.h"
#include "worker/attention/runner/ring_runner.h"
#include "worker/comm/communicator.h"

namespace ringleader::attention {

// AttentionOutput's codes and scales, which a device need not make.
struct OutputCast {
  bool is_wanted = false;
  torch::Tensor codes = {}, scales = {};
};

// A call's tensors: k and v for StartBackward; q, k and v for forward, which sets out and lse, and
// the cast if it is wanted; all but the gradients for backward, which sets them.
struct CallTensors {
  torch::Tensor q = {}, k = {}, v = {};
  torch::Tensor out = {}, lse = {};
  torch::Tensor d_out = {};
  AttentionGradients gradients = {};
  int first_head = 0;  // of the heads of one layer that are attended with one after the other
  OutputCast cast = {};
};

// A device's border to LibTorch. Throws c10::Error.
class TensorDevice {
 public:
  virtual ~TensorDevice() = default;
  virtual AttentionDevice& device() = 0;
  // Between the ranks that share out heads; null: this rank has all.
  virtual HeadExchange* heads() = 0;

  // `x`, [tokens, heads, head_dim], as the kernels take it; copied where its strides do not fit.
  // c10::Error, with `name`, for a tensor of another type or device.
  virtual torch::Tensor Take(const char* name, const torch::Tensor& x) const = 0;
  // `tensors`, as Take returned them, outlive the call.
  virtual std::unique_ptr<AttentionCall> Call(int layer, CallTensors* tensors) = 0;
};

class RingAttention : public ContextAttention {
 public:
  // INVALID_ARGUMENT, naming the option, where options do not fit each other or the device's ranks;
  // a sequence length that does not fit surfaces from Forward.
  static absl::StatusOr<std::unique_ptr<RingAttention>> Create(
      const patterns::AttentionOptions& options, std::unique_ptr<TensorDevice> device);

  AttentionOutput Forward(int layer, const torch::Tensor& q, const torch::Tensor& k,
                          const torch::Tensor& v) override;
  void StartForward(int layer, const torch::Tensor& k, const torch::Tensor& v) override;
  void SetDense(bool dense) override;
  using ContextAttention::SetDocuments;
  absl::Status SetDocuments(int64_t tokens, std::span<const int64_t> firsts, int64_t padding,
                            std::span<const int64_t> prefix_ends) override;
  absl::Status SetVisible(std::span<const kernels::KeyIntervals> queries) override;
  absl::Status SetLayout(const ring::DocumentLayout& layout) override;
  void SetStep(uint64_t step) override;
  void SetMove(float factor) override;
  void SetHeadBudgets(std::span<const patterns::LayerBudgets> layers) override;
  void MarkMicroBatch() override;
  void SetCasts(bool casts) override { casts_ = casts; }
  AttentionStats TakeStats() override;

 private:
  struct Engine {
    patterns::AttentionOptions options;
    std::unique_ptr<TensorDevice> device;
    std::unique_ptr<RingRunner> runner;
    std::optional<SharedHeads> heads;  // nullopt: this rank has all
  };
  class Record;
  using Indices = std::vector<std::shared_ptr<const LayerIndex>>;  // by group of heads

  // Sets out and lse of `tensors`, which hold all heads of this rank.
  static absl::StatusOr<Indices> AttendGroups(Engine& engine, int layer, CallTensors* tensors);
  // Sets the gradients.
  static absl::Status GroupsBackward(Engine& engine, int layer, const Indices& indices,
                                     CallTensors* tensors);

  explicit RingAttention(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}

  // Shared with the records, which may outlive this object.
  const std::shared_ptr<Engine> engine_;
  bool casts_ = false;
};

}  // namespace ringleader::attention
