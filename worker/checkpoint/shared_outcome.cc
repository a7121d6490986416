#include "worker/checkpoint/shared_outcome.h"

#include <cstring>
#include <string>
#include <string_view>

#include "base/status_macros.h"
#include "base/text/utf8.h"

namespace ringleader::checkpoint {
namespace {

// Fixed size, as AllGather wants.
struct Outcome {
  uint64_t number = 0;
  int32_t code = 0;
  char message[500] = {};
};

}  // namespace

absl::StatusOr<std::vector<uint64_t>> Agree(comm::Communicator& comm, const absl::Status& mine,
                                            uint64_t number) {
  Outcome outcome{.number = number, .code = mine.raw_code()};
  const std::string whole(mine.message());
  const std::string_view message = WholeCharacters(whole, sizeof(outcome.message) - 1);
  std::memcpy(outcome.message, message.data(), message.size());
  std::vector<Outcome> outcomes(comm.size());
  RETURN_IF_ERROR(
      comm.AllGather(comm::Channel::kControl, &outcome, sizeof(outcome), outcomes.data()));
  std::vector<uint64_t> numbers;
  // Same array on all ranks, so the same verdict.
  for (const Outcome& other : outcomes) {
    if (other.code != 0)
      return {absl::Status(static_cast<absl::StatusCode>(other.code), other.message)};
    numbers.push_back(other.number);
  }
  return numbers;
}

absl::StatusOr<std::string> ShareText(comm::Communicator& comm, const std::string& text) {
  uint64_t bytes = text.size();
  RETURN_IF_ERROR(comm.Broadcast(comm::Channel::kControl, &bytes, sizeof(bytes), 0));
  std::string shared = text;
  shared.resize(bytes);
  if (bytes > 0) RETURN_IF_ERROR(comm.Broadcast(comm::Channel::kControl, shared.data(), bytes, 0));
  return shared;
}

}  // namespace ringleader::checkpoint
