#include "bench/longca/gpu/gpu_helper_device.h"

#include <c10/cuda/CUDAStream.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

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

// A transfer and what it reads and writes, whose memory the stream gets back after it alone.
struct InFlight {
  const Tensor sent, received;
  comm::DeviceTransfer transfer = nullptr;

  InFlight(Tensor sent, Tensor received) : sent(std::move(sent)), received(std::move(received)) {}
  ~InFlight() { Order().IgnoreError(); }
  absl::Status Order() const {
    return transfer == nullptr ? absl::OkStatus() : transfer->Order(Stream());
  }
};

Tensor Upload(const int32_t* data, int64_t rows, int64_t columns) {
  return torch::from_blob(const_cast<int32_t*>(data), {rows, columns}, torch::kInt)
      .to(torch::kCUDA);
}

// Where the document of each of `tokens` starts.
std::vector<int32_t> StartsOf(const std::vector<int64_t>& firsts, size_t tokens) {
  std::vector<int32_t> starts(tokens, 0);
  for (const int64_t first : firsts) {
    std::fill(starts.begin() + first, starts.end(), static_cast<int32_t>(first));
  }
  return starts;
}

class GpuHelperDevice : public HelperDevice {
 public:
  GpuHelperDevice(const Asked& asked, std::span<const kernels::KeyIntervals> rows,
                  std::function<void()> meet, comm::DeviceCommunicator* communicator)
      : window_(asked.window), meet_(std::move(meet)), communicator_(*communicator) {
    if (asked.mask != patterns::Mask::kCausal || !asked.visible.empty()) {
      intervals_ = Upload(&rows.data()->begin, std::ssize(rows), kIntervalInts);
    } else if (asked.firsts.size() > 1) {
      starts_ = Upload(StartsOf(asked.firsts, rows.size()).data(), std::ssize(rows), 1);
    }
  }

  int rank() const override { return communicator_.rank(); }
  int ranks() const override { return communicator_.size(); }
  int tile() const override { return kGpuTile; }

  absl::StatusOr<Await> SendReceive(comm::Channel channel, const Tensor& sent, int to,
                                    const Tensor& received, int from) override {
    const auto in_flight = std::make_shared<InFlight>(sent, received);
    ASSIGN_OR_RETURN(in_flight->transfer,
                     communicator_.SendReceive(channel, to < 0 ? nullptr : sent.const_data_ptr(),
                                               to < 0 ? 0 : sent.nbytes(), to,
                                               from < 0 ? nullptr : received.mutable_data_ptr(),
                                               from < 0 ? 0 : received.nbytes(), from, Stream()));
    return [in_flight] { return in_flight->Order(); };
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
        .scale = call.scale};
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
        .scale = call.scale};
    return CallWithWorkspace(args, call.q, sm90::BackwardWorkspaceBytes, sm90::AttentionBackward);
  }

  absl::Status Meet() override {
    meet_();
    return absl::OkStatus();
  }
  void Finish() override { c10::cuda::getCurrentCUDAStream().synchronize(); }

 private:
  // By the kernels that trainers run under the mask.
  kernels::TileSelection TilesOf(const Call& call) const {
    const int64_t first = call.queries.rank * call.q.size(0);
    kernels::TileSelection tiles{.tile = kGpuTile, .window = window_};
    if (intervals_.defined()) {
      tiles.pattern = kernels::TilePattern::kFull;
      tiles.intervals = reinterpret_cast<const kernels::KeyIntervals*>(
          intervals_.const_data_ptr<int32_t>() + first * kIntervalInts);
      return tiles;
    }
    tiles.pattern = window_ > 0 ? kernels::TilePattern::kWindow : kernels::TilePattern::kCausal;
    if (starts_.defined()) tiles.document_starts = starts_.const_data_ptr<int32_t>() + first;
    return tiles;
  }

  // At most one of them: [tokens, 4], KeyIntervals, and [tokens, 1], where documents start.
  Tensor intervals_, starts_;
  const int64_t window_;
  const std::function<void()> meet_;
  comm::DeviceCommunicator& communicator_;
};

}  // namespace

std::unique_ptr<HelperDevice> CreateGpuHelperDevice(const Asked& asked,
                                                    std::span<const kernels::KeyIntervals> rows,
                                                    std::function<void()> meet,
                                                    comm::DeviceCommunicator* communicator) {
  return std::make_unique<GpuHelperDevice>(asked, rows, std::move(meet), communicator);
}

}  // namespace ringleader::bench
