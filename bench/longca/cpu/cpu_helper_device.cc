#include "bench/longca/cpu/cpu_helper_device.h"

#include <utility>

#include "bench/longca/problem.h"
#include "kernels/ops/token_view.h"
#include "kernels/reference/attention/attention.h"

namespace ringleader::bench {
namespace {

using kernels::ops::TokenView;
using torch::Tensor;

class CpuHelperDevice : public HelperDevice {
 public:
  CpuHelperDevice(std::span<const kernels::KeyIntervals> rows, comm::Communicator* communicator)
      : rows_(rows), communicator_(*communicator) {}

  int rank() const override { return communicator_.rank(); }
  int ranks() const override { return communicator_.size(); }
  int tile() const override { return kTile; }

  absl::StatusOr<Await> SendReceive(comm::Channel channel, const Tensor& sent, int to,
                                    const Tensor& received, int from) override {
    std::shared_ptr<comm::Transfer> transfer = communicator_.SendReceive(
        channel, to < 0 ? nullptr : sent.const_data_ptr(), to < 0 ? 0 : sent.nbytes(), to,
        from < 0 ? nullptr : received.mutable_data_ptr(), from < 0 ? 0 : received.nbytes(), from);
    return [sent, received, transfer = std::move(transfer)] { return transfer->Wait(); };
  }

  absl::Status Forward(const Call& call, const Tensor& out) override {
    return kernels::reference::AttentionForward(engine_, {.q = Read(call.q),
                                                          .k = Read(call.k),
                                                          .v = Read(call.v),
                                                          .out = Write(out),
                                                          .lse = call.lse.mutable_data_ptr<float>(),
                                                          .query_layout = call.queries,
                                                          .key_layout = call.keys,
                                                          .tiles = TilesOf(call),
                                                          .scale = call.scale});
  }

  absl::Status Backward(const Call& call, const Tensor& d_out, const Tensor& delta,
                        const Tensor& dq, const Tensor& dk, const Tensor& dv) override {
    return kernels::reference::AttentionBackward(engine_, {.q = Read(call.q),
                                                           .k = Read(call.k),
                                                           .v = Read(call.v),
                                                           .d_out = Read(d_out),
                                                           .lse = call.lse.const_data_ptr<float>(),
                                                           .delta = delta.const_data_ptr<float>(),
                                                           .dq = Write(dq),
                                                           .dk = Write(dk),
                                                           .dv = Write(dv),
                                                           .query_layout = call.queries,
                                                           .key_layout = call.keys,
                                                           .tiles = TilesOf(call),
                                                           .scale = call.scale});
  }

  absl::Status Meet() override {
    FlushCaches();
    return communicator_.Barrier();
  }
  void Finish() override {}

 private:
  static kernels::TokenMajor<const float> Read(const Tensor& x) {
    return TokenView(x, x.const_data_ptr<float>());
  }
  static kernels::TokenMajor<float> Write(const Tensor& x) {
    return TokenView(x, x.mutable_data_ptr<float>());
  }
  kernels::TileSelection TilesOf(const Call& call) const {
    return {.pattern = kernels::TilePattern::kFull,
            .tile = kTile,
            .intervals = rows_.data() + call.queries.rank * call.q.size(0)};
  }

  const std::span<const kernels::KeyIntervals> rows_;
  comm::Communicator& communicator_;
  kernels::reference::Engine engine_{1};
};

}  // namespace

std::unique_ptr<HelperDevice> CreateCpuHelperDevice(std::span<const kernels::KeyIntervals> rows,
                                                    comm::Communicator* communicator) {
  return std::make_unique<CpuHelperDevice>(rows, communicator);
}

}  // namespace ringleader::bench
