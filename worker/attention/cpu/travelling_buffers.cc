#include "worker/attention/cpu/travelling_buffers.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "worker/attention/stats/stopwatch.h"

namespace ringleader::attention {

TravellingBuffers::TravellingBuffers(comm::Communicator* communicator, int slots,
                                     size_t floats_per_slot, int64_t rows_per_part,
                                     comm::Channel inner, comm::Channel outer,
                                     double* exposed_seconds)
    : communicator_(communicator),
      floats_per_slot_(floats_per_slot),
      rows_per_part_(rows_per_part),
      inner_(inner),
      outer_(outer),
      exposed_seconds_(exposed_seconds),
      storage_(new float[slots * floats_per_slot]) {}

TravellingBuffers::~TravellingBuffers() {
  if (!in_flight()) return;
  communicator_->Abort("attention stopped with transfers in flight");
  AwaitAll().IgnoreError();
}

absl::StatusOr<RingSlots::Arrival> TravellingBuffers::Send(const ring::RingHop& hop) {
  const size_t bytes = floats_per_slot_ * sizeof(float);
  return [transfer = communicator_->SendReceive(ChannelOf(hop), data(hop.send_slot), bytes, hop.to,
                                                data(hop.receive_slot), bytes, hop.from),
          seconds = exposed_seconds_] {
    const Stopwatch watch(seconds);
    return transfer->Wait();
  };
}

template <typename Visit>
void TravellingBuffers::VisitRows(const ring::RowRuns& rows, int64_t shard, Visit visit) const {
  const size_t row = floats_per_slot_ / 2 / rows_per_part_;
  for (const size_t begin : {size_t{0}, shard * row}) {
    for (const ring::RowRun& run : rows) {
      visit(begin + run.begin * row, (run.end - run.begin) * row);
    }
  }
}

namespace {

// Rows on their way. The transfer lets go of both buffers before they go.
struct RowTransfer {
  std::vector<float> sent, received;
  std::unique_ptr<comm::Transfer> transfer = nullptr;
};

}  // namespace

absl::StatusOr<RingSlots::Arrival> TravellingBuffers::SendRows(const ring::RingHop& hop,
                                                               const ring::HopRows& rows) {
  auto moving = std::make_unique<RowTransfer>();
  VisitRows(rows.sent, rows.sent_shard, [&](size_t first, size_t count) {
    const float* const from = data(hop.send_slot) + first;
    moving->sent.insert(moving->sent.end(), from, from + count);
  });
  size_t arriving = 0;
  VisitRows(rows.received, rows.received_shard, [&](size_t, size_t count) { arriving += count; });
  moving->received.resize(arriving);
  // Both ends know where nothing travels.
  moving->transfer = communicator_->SendReceive(
      ChannelOf(hop), moving->sent.data(), moving->sent.size() * sizeof(float),
      moving->sent.empty() ? -1 : hop.to, moving->received.data(), arriving * sizeof(float),
      arriving == 0 ? -1 : hop.from);
  return [this, moving = std::move(moving), &rows, slot = hop.receive_slot]() -> absl::Status {
    {
      const Stopwatch watch(exposed_seconds_);
      RETURN_IF_ERROR(moving->transfer->Wait());
    }
    const float* from = moving->received.data();
    VisitRows(rows.received, rows.received_shard, [&](size_t first, size_t count) {
      std::copy_n(from, count, data(slot) + first);
      from += count;
    });
    return absl::OkStatus();
  };
}

absl::Status TravellingBuffers::AddRows(int to, int from, const ring::HopRows& brought) {
  VisitRows(brought.received, brought.received_shard, [&](size_t first, size_t count) {
    float* const sum = data(to) + first;
    const float* const added = data(from) + first;
    for (size_t i = 0; i < count; ++i) sum[i] += added[i];
  });
  return absl::OkStatus();
}

void TravellingBuffers::StartAllGather() {
  const int rank = communicator_->rank(), ranks = communicator_->size();
  for (int distance = 1; distance < ranks; ++distance) {
    const ring::RingHop hop{.to = (rank + distance) % ranks,
                            .from = (rank - distance + ranks) % ranks,
                            .send_slot = rank,
                            .receive_slot = (rank - distance + ranks) % ranks};
    Track(hop.send_slot, hop.receive_slot, *Send(hop));
  }
}

absl::Status TravellingBuffers::ZeroSlot(int slot) {
  std::fill_n(data(slot), floats_per_slot_, 0.0f);
  return absl::OkStatus();
}

absl::Status TravellingBuffers::AddSlot(int to, int from) {
  float* const sum = data(to);
  const float* const added = data(from);
  for (size_t i = 0; i < floats_per_slot_; ++i) sum[i] += added[i];
  return absl::OkStatus();
}

}  // namespace ringleader::attention
