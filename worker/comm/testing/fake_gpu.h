// GPUs for tests that have none: linked in place of CUDA's runtime and of NCCL. Calls do nothing
// but write themselves down, and answer as a test says.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace ringleader::comm::testing {

// Of all ranks of a test; reset by ResetFakeGpu().
struct FakeGpu {
  std::atomic<cudaError_t> events = cudaErrorNotReady;  // of those that are asked whether they have
  std::atomic<uintptr_t> reached_events = 0;  // but so many of a thread's first have been reached
  std::atomic<ncclResult_t> state = ncclSuccess;      // of all communicators
  std::atomic<ncclResult_t> finalize = ncclSuccess;   // what the call answers
  std::atomic<ncclResult_t> reduction = ncclSuccess;  // the same
  std::atomic<ncclResult_t> group_end = ncclSuccess;  // the same
  std::atomic<bool> is_full = false;                  // memory is refused
  std::atomic<size_t> free_bytes = 0;
  std::atomic<int> ids = 0, destroyed = 0, aborted = 0;  // of NCCL's communicators
  std::atomic<int> events_made = 0;
};
FakeGpu& TheFakeGpu();
void ResetFakeGpu();

// What this thread has called since the last time. Streams, events and communicators go by the
// order in which the thread made them: "c1" is its first communicator.
std::vector<std::string> TakeCalls();

// Addresses and streams that no call looks behind.
inline void* At(uintptr_t address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}
inline cudaStream_t Stream(uintptr_t number) {
  return static_cast<cudaStream_t>(At(number));
}

}  // namespace ringleader::comm::testing
