// The slots of a ring schedule in the host's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "worker/attention/runner/ring_slots.h"
#include "worker/comm/communicator.h"

namespace ringleader::attention {

class TravellingBuffers : public RingSlots {
 public:
  // A slot has room for two parts of `rows_per_part` rows each, which lie together if there are
  // fewer. `exposed_seconds` grows by the time spent waiting.
  TravellingBuffers(comm::Communicator* communicator, int slots, size_t floats_per_slot,
                    int64_t rows_per_part, comm::Channel inner, comm::Channel outer,
                    double* exposed_seconds);
  // Transfers still in flight mean that something failed: aborts the communicator, so that none
  // touches the buffers any more.
  ~TravellingBuffers() override;
  TravellingBuffers(const TravellingBuffers&) = delete;
  TravellingBuffers& operator=(const TravellingBuffers&) = delete;

  float* data(int slot) const { return storage_.get() + slot * floats_per_slot_; }
  size_t floats_per_slot() const { return floats_per_slot_; }
  void* memory(int slot) const override { return data(slot); }

  // Starts a gather: slot r of every rank receives rank r's slot r.
  void StartAllGather();

 protected:
  absl::StatusOr<Arrival> Send(const ring::RingHop& hop) override;
  absl::Status ZeroSlot(int slot) override;
  absl::Status AddSlot(int to, int from) override;
  // What is carried lies together on its way.
  absl::StatusOr<Arrival> SendRows(const ring::RingHop& hop, const ring::HopRows& rows) override;
  absl::Status AddRows(int to, int from, const ring::HopRows& brought) override;

 private:
  // visit(first, count) for the floats of these rows in a slot, in both parts of `shard` rows.
  template <typename Visit>
  void VisitRows(const ring::RowRuns& rows, int64_t shard, Visit visit) const;
  comm::Channel ChannelOf(const ring::RingHop& hop) const {
    return hop.link == ring::RingLink::kInner ? inner_ : outer_;
  }

  comm::Communicator* const communicator_;
  const size_t floats_per_slot_;
  const int64_t rows_per_part_;
  const comm::Channel inner_, outer_;
  double* const exposed_seconds_;
  std::unique_ptr<float[]> storage_;
};

}  // namespace ringleader::attention
