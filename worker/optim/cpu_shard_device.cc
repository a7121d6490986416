#include "worker/optim/cpu_shard_device.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/numbers/ceil_div.h"
#include "base/status_macros.h"
#include "worker/attention/stats/stopwatch.h"

namespace ringleader::optim {
namespace {

using attention::Stopwatch;
using comm::Channel;
using torch::Tensor;

// What a thread takes of a pass over a shard at a time; sums are taken by block.
constexpr int64_t kBlockElements = int64_t{1} << 16;

int64_t Blocks(int64_t elements) {
  return CeilDiv(elements, kBlockElements);
}

class CpuTransfer : public ShardTransfer {
 public:
  // `*wait`: the seconds waited, at the time of Await; outlives this.
  CpuTransfer(std::unique_ptr<comm::Transfer> transfer, double* const* wait)
      : transfer_(std::move(transfer)), wait_(wait) {}
  absl::Status Await() override {
    const Stopwatch timer(*wait_);
    return transfer_->Wait();
  }

 private:
  const std::unique_ptr<comm::Transfer> transfer_;
  double* const* const wait_;
};

}  // namespace

// The owner's own part first, then its peers' in the order of ranks.
absl::StatusOr<ShardTransferPtr> CpuShardDevice::ReduceSum(const Tensor& data, const Tensor& sum,
                                                           int owner) {
  const size_t bytes = data.nbytes();
  if (rank() != owner) {
    return std::make_unique<CpuTransfer>(
        comm_.SendReceive(Channel::kGradients, data.const_data_ptr(), bytes, owner, nullptr, 0, -1),
        &wait_);
  }
  if (sum.const_data_ptr() != data.const_data_ptr()) sum.copy_(data);
  received_.resize(std::max<size_t>(received_.size(), data.numel()));
  float* const total = sum.mutable_data_ptr<float>();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == owner) continue;
    {
      const Stopwatch timer(wait_);
      RETURN_IF_ERROR(
          comm_.SendReceive(Channel::kGradients, nullptr, 0, -1, received_.data(), bytes, peer)
              ->Wait());
    }
    for (int64_t i = 0; i < data.numel(); ++i) total[i] += received_[i];
  }
  return nullptr;
}

absl::StatusOr<ShardTransferPtr> CpuShardDevice::AllReduceSum(const Tensor& data) {
  const Stopwatch timer(wait_);
  RETURN_IF_ERROR(comm_.AllReduceSum(Channel::kGradients, data.mutable_data_ptr<double>(),
                                     static_cast<size_t>(data.numel())));
  return nullptr;
}

absl::StatusOr<ShardTransferPtr> CpuShardDevice::AllGather(const Tensor& whole) {
  const size_t bytes = whole.nbytes() / size();
  char* const data = static_cast<char*>(whole.mutable_data_ptr());
  const Stopwatch timer(wait_);
  RETURN_IF_ERROR(comm_.AllGather(Channel::kGradients, data + rank() * bytes, bytes, data));
  return nullptr;
}

absl::StatusOr<ShardTransferPtr> CpuShardDevice::Broadcast(const Tensor& data, int root) {
  const Stopwatch timer(wait_);
  RETURN_IF_ERROR(
      comm_.Broadcast(Channel::kGradients, data.mutable_data_ptr(), data.nbytes(), root));
  return nullptr;
}

absl::Status CpuShardDevice::SumOfSquares(const Tensor& values, const Tensor& sum) {
  const float* const data = values.const_data_ptr<float>();
  std::vector<double> partial(Blocks(values.numel()));
  pool_.For(Blocks(values.numel()), [&](int64_t block, int /*worker*/) {
    const int64_t begin = block * kBlockElements;
    partial[block] =
        optim::SumOfSquares(data + begin, std::min(kBlockElements, values.numel() - begin));
  });
  double total = 0.0;
  for (const double part : partial) total += part;
  sum.fill_(total);
  return absl::OkStatus();
}

absl::Status CpuShardDevice::Update(const AdamWOptions& options, const ShardUpdate& update) {
  if (update.parameters != nullptr) {
    return absl::InvalidArgumentError("the CPU trains in float32, not in bfloat16");
  }
  const double scale = update.scale.item<double>();
  if (!std::isfinite(scale)) return absl::OkStatus();
  const AdamWPass pass(options, update.learning_rate, update.weight_decay, update.step, scale);
  pool_.For(Blocks(update.count), [&](int64_t block, int /*worker*/) {
    const int64_t at = block * kBlockElements;
    pass.Run(update.master + at, update.first_moment + at, update.second_moment + at,
             update.gradient + at, std::min(kBlockElements, update.count - at));
  });
  return absl::OkStatus();
}

absl::Status CpuShardDevice::ReadFigures(const Tensor& figures) {
  std::copy_n(figures.const_data_ptr<double>(), figures_.size(), figures_.begin());
  return absl::OkStatus();
}

absl::StatusOr<ShardSource> CpuShardDevice::Snapshot(int64_t begin, const Tensor& master,
                                                     const Tensor& first_moment,
                                                     const Tensor& second_moment) {
  const auto copy = [](const Tensor& from) {
    const float* const data = from.const_data_ptr<float>();
    return std::vector<float>(data, data + from.numel());
  };
  OptimizerShard shard{.begin = begin,
                       .master = copy(master),
                       .first_moment = copy(first_moment),
                       .second_moment = copy(second_moment)};
  return [shard = std::move(shard)]() mutable -> absl::StatusOr<OptimizerShard> {
    return std::move(shard);
  };
}

}  // namespace ringleader::optim
