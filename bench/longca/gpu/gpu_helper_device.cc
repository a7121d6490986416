#include "bench/longca/gpu/gpu_helper_device.h"

#include <c10/cuda/CUDAStream.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <utility>

#include "base/status_macros.h"
#include "kernels/ops/cuda_call.h"
#include "kernels/sm90/attention.h"

namespace ringleader::bench {
namespace {

namespace sm90 = kernels::sm90;
using kernels::ops::CallWithWorkspace;
using kernels::ops::FloatView;
using kernels::ops::Stream;
using kernels::ops::View;
using torch::Tensor;

constexpr int kGpuTile = 128;
constexpr int64_t kIntervalInts = sizeof(kernels::KeyIntervals) / sizeof(int32_t);

class GpuHelperDevice : public HelperDevice {
 public:
  GpuHelperDevice(std::span<const kernels::KeyIntervals> rows, std::function<void()> meet,
                  comm::DeviceCommunicator* communicator)
      : rows_(torch::from_blob(const_cast<kernels::KeyIntervals*>(rows.data()),
                               {std::ssize(rows), kIntervalInts}, torch::kInt)
                  .to(torch::kCUDA)),
        meet_(std::move(meet)),
        communicator_(*communicator) {}

  int rank() const override { return communicator_.rank(); }
  int ranks() const override { return communicator_.size(); }

  absl::StatusOr<Await> SendReceive(comm::Channel channel, const Tensor& sent, int to,
                                    const Tensor& received, int from) override {
    ASSIGN_OR_RETURN(comm::DeviceTransfer transfer,
                     communicator_.SendReceive(channel, to < 0 ? nullptr : sent.const_data_ptr(),
                                               to < 0 ? 0 : sent.nbytes(), to,
                                               from < 0 ? nullptr : received.mutable_data_ptr(),
                                               from < 0 ? 0 : received.nbytes(), from, Stream()));
    return [transfer = std::move(transfer)] {
      return transfer == nullptr ? absl::OkStatus() : transfer->Order(Stream());
    };
  }

  absl::Status Forward(const Call& call, const Tensor& out) override {
    const kernels::AttentionForwardArgs<__nv_bfloat16> args{
        .q = View(call.q),
        .k = View(call.k),
        .v = View(call.v),
        .out = FloatView(out),
        .lse = call.lse.mutable_data_ptr<float>(),
        .query_layout = call.queries,
        .key_layout = call.keys,
        .tiles = TilesOf(call),
        .scale = ScaleOf(call)};
    return CallWithWorkspace(args, call.q, sm90::ForwardWorkspaceBytes, sm90::AttentionForward);
  }

  absl::Status Backward(const Call& call, const Tensor& d_out, const Tensor& delta,
                        const Tensor& dq, const Tensor& dk, const Tensor& dv) override {
    const kernels::AttentionBackwardArgs<__nv_bfloat16> args{
        .q = View(call.q),
        .k = View(call.k),
        .v = View(call.v),
        .d_out = View(d_out),
        .lse = call.lse.const_data_ptr<float>(),
        .delta = delta.const_data_ptr<float>(),
        .dq = FloatView(dq),
        .dk = FloatView(dk),
        .dv = FloatView(dv),
        .query_layout = call.queries,
        .key_layout = call.keys,
        .tiles = TilesOf(call),
        .scale = ScaleOf(call)};
    return CallWithWorkspace(args, call.q, sm90::BackwardWorkspaceBytes, sm90::AttentionBackward);
  }

  absl::Status Meet() override {
    meet_();
    return absl::OkStatus();
  }
  void Finish() override { c10::cuda::getCurrentCUDAStream().synchronize(); }

 private:
  kernels::TileSelection TilesOf(const Call& call) const {
    const int64_t first = call.queries.rank * call.q.size(0) * kIntervalInts;
    return {.pattern = kernels::TilePattern::kFull,
            .tile = kGpuTile,
            .intervals = reinterpret_cast<const kernels::KeyIntervals*>(
                rows_.const_data_ptr<int32_t>() + first)};
  }
  static float ScaleOf(const Call& call) {
    return 1.0f / std::sqrt(static_cast<float>(call.q.size(2)));
  }

  const Tensor rows_;  // [tokens, 4]
  const std::function<void()> meet_;
  comm::DeviceCommunicator& communicator_;
};

}  // namespace

std::unique_ptr<HelperDevice> CreateGpuHelperDevice(std::span<const kernels::KeyIntervals> rows,
                                                    std::function<void()> meet,
                                                    comm::DeviceCommunicator* communicator) {
  return std::make_unique<GpuHelperDevice>(rows, std::move(meet), communicator);
}

}  // namespace ringleader::bench
