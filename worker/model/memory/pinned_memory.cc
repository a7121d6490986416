#include "worker/model/memory/pinned_memory.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/numbers/ceil_div.h"

namespace ringleader::model {
namespace {

constexpr int64_t kPiece = int64_t{1} << 30;
constexpr int kMaxThreads = 8;

absl::Status Refused(int64_t bytes, const char* reason) {
  return absl::ResourceExhaustedError(absl::StrFormat(
      "%.1f GiB of pinned host memory for kept activations: %s; set resources.offload: none, or "
      "use more resources.trainers on more nodes or a shorter data.sequence_length",
      static_cast<double>(bytes) / (int64_t{1} << 30), reason));
}

// Pages are given out on several threads: one alone takes a second for a few GiB. Returns errno.
int Populate(char* data, int64_t bytes) {
  std::atomic<int64_t> next = 0;
  std::atomic<int> error = 0;
  const auto work = [&] {
    for (int64_t begin = 0; (begin = next.fetch_add(kPiece)) < bytes && error == 0;) {
      const auto size = static_cast<size_t>(std::min(kPiece, bytes - begin));
      if (madvise(data + begin, size, MADV_POPULATE_WRITE) != 0) error = errno;
    }
  };
  const int64_t pieces = CeilDiv(bytes, kPiece);
  std::vector<std::thread> threads;
  for (int i = 0; i < std::min<int64_t>(kMaxThreads, pieces); ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  return error;
}

}  // namespace

absl::StatusOr<PinnedMemory> PinnedMemory::Allocate(int64_t bytes) {
  PinnedMemory memory;
  void* const data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return Refused(bytes, std::strerror(errno));
  memory.data_ = static_cast<char*>(data);
  memory.bytes_ = bytes;
  // Fewer pages to pin; where the system has no large ones, or cannot populate (EINVAL), it merely
  // takes longer.
  madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  if (const int error = Populate(memory.data_, bytes); error != 0 && error != EINVAL) {
    return Refused(bytes, std::strerror(error));
  }
  const cudaError_t error =
      cudaHostRegister(data, static_cast<size_t>(bytes), cudaHostRegisterDefault);
  if (error != cudaSuccess) return Refused(bytes, cudaGetErrorString(error));
  memory.registered_ = true;
  return memory;
}

PinnedMemory::~PinnedMemory() {
  if (registered_) cudaHostUnregister(data_);
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(bytes_));
}

}  // namespace ringleader::model
