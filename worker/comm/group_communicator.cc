#include "worker/comm/group_communicator.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <set>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/numbers/ceil_div.h"
#include "base/status_macros.h"

namespace ringleader::comm {
namespace {

// Elements that one round of a large all-reduce handles: bounds its scratch memory.
constexpr size_t kRoundElements = size_t{4} << 20;
// Below this an all-reduce is one exchange of everything instead of reduce-scatter and all-gather.
constexpr size_t kSmallElements = 4096;
// Among more ranks than these, all-gathers of no more bytes than those are passed on from rank to
// rank: what they take is messages.
constexpr int kFewRanks = 8;
constexpr size_t kSmallBytes = kSmallElements * sizeof(double);

class TransferPair : public Transfer {
 public:
  TransferPair(PendingTransferPtr send, PendingTransferPtr receive)
      : send_(std::move(send)), receive_(std::move(receive)) {}

  // An exception may unwind past a transfer before its Wait: the buffers are let go before they
  // die.
  ~TransferPair() override {
    for (const PendingTransferPtr& pending : {send_, receive_}) {
      if (pending == nullptr) continue;
      pending->Finish(absl::CancelledError("the transfer was dropped before it was done"));
      pending->Wait().IgnoreError();
    }
  }

  absl::Status Wait() override {
    absl::Status sent = send_ == nullptr ? absl::OkStatus() : send_->Wait();
    absl::Status received = receive_ == nullptr ? absl::OkStatus() : receive_->Wait();
    return sent.ok() ? received : sent;
  }

 private:
  const PendingTransferPtr send_;
  const PendingTransferPtr receive_;
};

absl::Status WaitForAll(const std::vector<std::unique_ptr<Transfer>>& transfers) {
  absl::Status first_error;
  for (const std::unique_ptr<Transfer>& transfer : transfers) first_error.Update(transfer->Wait());
  return first_error;
}

// Several as one.
class Transfers : public Transfer {
 public:
  explicit Transfers(std::vector<std::unique_ptr<Transfer>> transfers)
      : transfers_(std::move(transfers)) {}
  absl::Status Wait() override { return WaitForAll(transfers_); }

 private:
  const std::vector<std::unique_ptr<Transfer>> transfers_;
};

std::vector<int> AllRanks(int size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// FNV-1a, folded to the 24 bits that a stream id has for its group; never 0, which is the whole
// communicator.
uint32_t GroupId(uint32_t parent, const std::vector<int>& members, uint32_t occurrence) {
  uint64_t hash = 14695981039346656037u;
  const auto mix = [&hash](uint32_t value) { hash = (hash ^ value) * 1099511628211u; };
  mix(parent);
  mix(occurrence);
  for (int member : members) mix(static_cast<uint32_t>(member));
  return static_cast<uint32_t>((hash ^ hash >> 24 ^ hash >> 48) % 0xffffff) + 1;
}

template <typename T>
void Add(T* into, const T* other, size_t count) {
  for (size_t i = 0; i < count; ++i) into[i] += other[i];
}

}  // namespace

GroupCommunicator::GroupCommunicator(const std::shared_ptr<Transport>& transport)
    : GroupCommunicator(transport, AllRanks(transport->size()), 0) {}

GroupCommunicator::GroupCommunicator(std::shared_ptr<Transport> transport, std::vector<int> members,
                                     uint32_t group)
    : transport_(std::move(transport)), members_(std::move(members)), group_(group) {
  rank_ = static_cast<int>(std::find(members_.begin(), members_.end(), transport_->rank()) -
                           members_.begin());
}

std::unique_ptr<Transfer> GroupCommunicator::SendReceive(Channel channel, const void* send,
                                                         size_t send_bytes, int to, void* receive,
                                                         size_t receive_bytes, int from) {
  PendingTransferPtr sending, receiving;
  // The receive first: a message to this rank itself then finds it.
  if (from >= 0) {
    receiving = std::make_shared<PendingTransfer>(receive, receive_bytes);
    transport_->Receive(Stream(channel), members_.at(from), receiving);
  }
  if (to >= 0) {
    // A transport only reads what it sends; PendingTransfer serves both directions.
    sending = std::make_shared<PendingTransfer>(const_cast<void*>(send), send_bytes);
    transport_->Send(Stream(channel), members_.at(to), sending);
  }
  return std::make_unique<TransferPair>(std::move(sending), std::move(receiving));
}

std::unique_ptr<Transfer> GroupCommunicator::AllToAll(Channel channel, const void* send,
                                                      size_t bytes, void* receive) {
  const char* const parts = static_cast<const char*>(send);
  char* const received = static_cast<char*>(receive);
  std::vector<std::unique_ptr<Transfer>> transfers;
  for (int r = 0; r < size(); ++r) {
    transfers.push_back(
        SendReceive(channel, parts + r * bytes, bytes, r, received + r * bytes, bytes, r));
  }
  return std::make_unique<Transfers>(std::move(transfers));
}

// Every rank reduces its own share of the elements, in rank order, and hands the result to all: 2
// (n - 1) / n of the data per rank on the wire, and the same bits on every rank.
template <typename T, typename Reduce>
absl::Status GroupCommunicator::AllReduce(Channel channel, T* data, size_t count, Reduce reduce) {
  const size_t ranks = members_.size();
  if (ranks == 1) return transport_->status();
  if (count <= kSmallElements) {
    std::vector<T> all(ranks * count);
    RETURN_IF_ERROR(AllGather(channel, data, count * sizeof(T), all.data()));
    std::copy_n(all.begin(), count, data);
    for (size_t r = 1; r < ranks; ++r) reduce(data, &all[r * count], count);
    return absl::OkStatus();
  }
  std::vector<T> shares;
  for (size_t done = 0; done < count; done += kRoundElements) {
    T* round = data + done;
    const size_t elements = std::min(kRoundElements, count - done);
    const size_t share = CeilDiv(elements, ranks);
    const auto begin = [&](size_t r) { return std::min(r * share, elements); };
    const auto length = [&](size_t r) { return begin(r + 1) - begin(r); };
    const size_t mine = length(rank_);
    shares.resize(ranks * share);
    std::vector<std::unique_ptr<Transfer>> transfers;
    for (size_t r = 0; r < ranks; ++r) {
      if (static_cast<int>(r) == rank_) continue;
      transfers.push_back(SendReceive(channel, round + begin(r), length(r) * sizeof(T),
                                      static_cast<int>(r), &shares[r * share], mine * sizeof(T),
                                      static_cast<int>(r)));
    }
    RETURN_IF_ERROR(WaitForAll(transfers));
    transfers.clear();
    T* result = round + begin(rank_);
    if (rank_ > 0) {
      std::copy_n(result, mine, &shares[rank_ * share]);
      std::copy_n(&shares[0], mine, result);
    }
    for (size_t r = 1; r < ranks; ++r) reduce(result, &shares[r * share], mine);
    for (size_t r = 0; r < ranks; ++r) {
      if (static_cast<int>(r) == rank_) continue;
      transfers.push_back(SendReceive(channel, result, mine * sizeof(T), static_cast<int>(r),
                                      round + begin(r), length(r) * sizeof(T),
                                      static_cast<int>(r)));
    }
    RETURN_IF_ERROR(WaitForAll(transfers));
  }
  return absl::OkStatus();
}

absl::Status GroupCommunicator::AllReduceSum(Channel channel, float* data, size_t count) {
  return AllReduce(channel, data, count, Add<float>);
}

absl::Status GroupCommunicator::AllReduceSum(Channel channel, double* data, size_t count) {
  return AllReduce(channel, data, count, Add<double>);
}

absl::Status GroupCommunicator::AllReduceMax(Channel channel, float* data, size_t count) {
  return AllReduce(channel, data, count, [](float* into, const float* other, size_t n) {
    for (size_t i = 0; i < n; ++i) into[i] = std::max(into[i], other[i]);
  });
}

absl::Status GroupCommunicator::AllGather(Channel channel, const void* send, size_t bytes,
                                          void* receive) {
  if (size() > kFewRanks && bytes <= kSmallBytes) return PassOn(channel, send, bytes, receive);
  char* const out = static_cast<char*>(receive);
  std::vector<std::unique_ptr<Transfer>> transfers;
  for (int r = 0; r < size(); ++r) {
    if (r == rank_) continue;
    transfers.push_back(SendReceive(channel, send, bytes, r, out + r * bytes, bytes, r));
  }
  // `send` may be this rank's place in `receive` already.
  if (bytes > 0) std::memmove(out + rank_ * bytes, send, bytes);
  return WaitForAll(transfers);
}

// Bruck et al., "Efficient Algorithms for All-to-All Communications in Multiport Message-Passing
// Systems" (IEEE TPDS 8(11), 1997), section 4: what a rank has is doubled in each round, so that
// it sends log2(n) messages instead of n - 1, of as many bytes.
absl::Status GroupCommunicator::PassOn(Channel channel, const void* send, size_t bytes,
                                       void* receive) {
  const int ranks = size();
  std::vector<char> parts(ranks * bytes);  // of this rank and those behind it, in their order
  if (bytes > 0) std::memcpy(parts.data(), send, bytes);
  for (int have = 1; have < ranks; have *= 2) {
    const size_t more = std::min(have, ranks - have) * bytes;
    RETURN_IF_ERROR(SendReceive(channel, parts.data(), more, (rank_ + ranks - have) % ranks,
                                parts.data() + have * bytes, more, (rank_ + have) % ranks)
                        ->Wait());
  }
  char* const out = static_cast<char*>(receive);
  const size_t before = rank_ * bytes;  // of ranks before this one, which lie last
  std::copy(parts.begin(), parts.end() - before, out + before);
  std::copy(parts.end() - before, parts.end(), out);
  return absl::OkStatus();
}

absl::Status GroupCommunicator::ReduceScatterSum(Channel channel, const float* data, size_t count,
                                                 float* receive) {
  const size_t ranks = members_.size();
  std::vector<float> shares(ranks * count);
  std::vector<std::unique_ptr<Transfer>> transfers;
  for (size_t r = 0; r < ranks; ++r) {
    if (static_cast<int>(r) == rank_) continue;
    transfers.push_back(SendReceive(channel, data + r * count, count * sizeof(float),
                                    static_cast<int>(r), &shares[r * count], count * sizeof(float),
                                    static_cast<int>(r)));
  }
  RETURN_IF_ERROR(WaitForAll(transfers));
  std::copy_n(data + rank_ * count, count, shares.begin() + rank_ * count);
  std::copy_n(shares.begin(), count, receive);
  for (size_t r = 1; r < ranks; ++r) Add(receive, &shares[r * count], count);
  return transport_->status();
}

// A binomial tree: each rank hears from one and tells log2(n) others at most.
absl::Status GroupCommunicator::Broadcast(Channel channel, void* data, size_t bytes, int root) {
  const int ranks = size(), place = (rank_ + ranks - root) % ranks;
  int reach = 1;  // ranks from this one on that hear by it
  for (; reach < ranks && place % (2 * reach) == 0; reach *= 2) {
  }
  if (place > 0) {
    const int from = (rank_ + ranks - reach) % ranks;
    RETURN_IF_ERROR(SendReceive(channel, nullptr, 0, -1, data, bytes, from)->Wait());
  }
  std::vector<std::unique_ptr<Transfer>> transfers;
  for (reach /= 2; reach > 0; reach /= 2) {
    if (place + reach >= ranks) continue;
    transfers.push_back(SendReceive(channel, data, bytes, (rank_ + reach) % ranks, nullptr, 0, -1));
  }
  return WaitForAll(transfers);
}

absl::Status GroupCommunicator::Barrier() {
  const char mine = 0;
  std::vector<char> all(members_.size());
  return AllGather(Channel::kControl, &mine, 1, all.data());
}

absl::StatusOr<std::unique_ptr<Communicator>> GroupCommunicator::Split(
    const std::vector<int>& ranks) {
  std::vector<int> members;
  for (int rank : ranks) {
    if (rank < 0 || rank >= size()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("cannot split off rank %d: the communicator has %d ranks", rank, size()));
    }
    members.push_back(members_[rank]);
  }
  if (std::find(ranks.begin(), ranks.end(), rank_) == ranks.end() ||
      std::set<int>(ranks.begin(), ranks.end()).size() != ranks.size()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "cannot split off ranks [%s] on rank %d: the list must hold this rank, and none twice",
        absl::StrJoin(ranks, ", "), rank_));
  }
  absl::MutexLock lock(&mutex_);
  const uint32_t group = GroupId(group_, members, splits_[members]++);
  return std::unique_ptr<Communicator>(new GroupCommunicator(transport_, members, group));
}

}  // namespace ringleader::comm
