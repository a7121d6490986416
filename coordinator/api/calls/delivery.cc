#include "coordinator/api/calls/delivery.h"

#include <utility>

namespace ringleader::api {
namespace {

// What gRPC keeps of a call whose answer waits, besides the answer.
constexpr size_t kBytesOfACall = 16384;

}  // namespace

absl::Status Delivery::Begin(limits::Quota* unread, const std::string& client, size_t bytes,
                             const grpc::CallbackServerContext& context, absl::Duration patience) {
  absl::StatusOr<limits::Quota::Hold> hold =
      unread->Take(client, static_cast<int64_t>(kBytesOfACall + bytes));
  if (hold.ok()) hold_ = *std::move(hold);
  if (patience != absl::InfiniteDuration()) patience_.Begin(context, patience);
  return hold.status();
}

void Delivery::BeginAnyway(limits::Quota* unread, const std::string& client, size_t bytes,
                           const grpc::CallbackServerContext& context, absl::Duration patience) {
  hold_ = unread->TakeAnyway(client, static_cast<int64_t>(kBytesOfACall + bytes));
  patience_.Begin(context, patience);
}

void Delivery::End() {
  patience_.End();
  hold_ = {};
}

}  // namespace ringleader::api
