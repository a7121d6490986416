#include "worker/optim/shard_copier.h"

#include <sys/mman.h>

#include <algorithm>
#include <thread>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/numbers/ceil_div.h"
#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"

namespace ringleader::optim {
namespace {

// Fresh memory costs a fault a page, which takes longer than the copy itself: larger pages where
// the system has them, and many at once. Without either the copy is slower, no more. In pieces,
// because other threads cannot map memory while a call lasts: training would stand still.
void Populate(void* memory, size_t bytes) {
  constexpr size_t kPage = 4096, kPiece = size_t{32} << 20;
  const size_t skipped = -reinterpret_cast<uintptr_t>(memory) % kPage;
  if (bytes < skipped + kPage) return;
  char* const begin = static_cast<char*>(memory) + skipped;
  const size_t whole = (bytes - skipped) / kPage * kPage;
  madvise(begin, whole, MADV_HUGEPAGE);
  for (size_t at = 0; at < whole; at += kPiece) {
    madvise(begin + at, std::min(kPiece, whole - at), MADV_POPULATE_WRITE);
  }
}

}  // namespace

ShardCopier::~ShardCopier() {
  for (const Piece& piece : pieces_) {
    if (piece.memory != nullptr) cudaFreeHost(piece.memory);
    if (piece.arrived != nullptr) cudaEventDestroy(piece.arrived);
  }
  if (ready_ != nullptr) cudaEventDestroy(ready_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

absl::Status ShardCopier::Prepare() {
  if (pieces_[1].arrived != nullptr) return absl::OkStatus();
  RETURN_IF_CUDA_ERROR(cudaGetDevice(&device_), "ShardCopier: device");
  if (stream_ == nullptr) {
    RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
                         "ShardCopier: stream");
  }
  if (ready_ == nullptr) {
    RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&ready_, cudaEventDisableTiming),
                         "ShardCopier: event");
  }
  for (Piece& piece : pieces_) {
    if (piece.memory == nullptr) {
      RETURN_IF_CUDA_ERROR(cudaHostAlloc(reinterpret_cast<void**>(&piece.memory),
                                         kPieceElements * sizeof(float), cudaHostAllocDefault),
                           "ShardCopier: pinned memory");
    }
    // Blocking: the thread that waits leaves its core to training.
    RETURN_IF_CUDA_ERROR(
        cudaEventCreateWithFlags(&piece.arrived, cudaEventDisableTiming | cudaEventBlockingSync),
        "ShardCopier: event");
  }
  return absl::OkStatus();
}

absl::Status ShardCopier::Begin(cudaStream_t after) {
  Wait();
  RETURN_IF_ERROR(Prepare());
  RETURN_IF_CUDA_ERROR(cudaEventRecord(ready_, after), "ShardCopier: state");
  RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(stream_, ready_), "ShardCopier: state");
  absl::MutexLock lock(&mutex_);
  copying_ = true;
  return absl::OkStatus();
}

absl::Status ShardCopier::Copy(std::span<const Section> sections, int64_t elements) {
  RETURN_IF_CUDA_ERROR(cudaSetDevice(device_), "ShardCopier: device");
  for (const Section& section : sections) {
    section.to->clear();
    section.to->reserve(elements);
  }
  // Ahead of the copy, or beside it.
  std::vector<std::thread> populating;
  for (const Section& section : sections) {
    populating.emplace_back(Populate, section.to->data(), elements * sizeof(float));
  }
  absl::Status status;
  for (const Section& section : sections) {
    if (status.ok()) status = CopySection(section, elements);
  }
  for (std::thread& thread : populating) thread.join();
  return status;
}

absl::Status ShardCopier::CopySection(const Section& section, int64_t elements) {
  const int64_t count = CeilDiv(elements, kPieceElements);
  const auto size_of = [&](int64_t i) {
    return std::min(kPieceElements, elements - i * kPieceElements);
  };
  for (int64_t i = 0; i <= count; ++i) {
    if (i < count) {
      const Piece& next = pieces_[i % 2];
      RETURN_IF_CUDA_ERROR(
          cudaMemcpyAsync(next.memory, section.from + i * kPieceElements,
                          size_of(i) * sizeof(float), cudaMemcpyDeviceToHost, stream_),
          "ShardCopier: copy");
      RETURN_IF_CUDA_ERROR(cudaEventRecord(next.arrived, stream_), "ShardCopier: copy");
    }
    if (i == 0) continue;
    const Piece& last = pieces_[(i - 1) % 2];
    RETURN_IF_CUDA_ERROR(cudaEventSynchronize(last.arrived), "ShardCopier: copy");
    section.to->insert(section.to->end(), last.memory, last.memory + size_of(i - 1));
  }
  return absl::OkStatus();
}

void ShardCopier::End() {
  absl::MutexLock lock(&mutex_);
  copying_ = false;
}

double ShardCopier::Wait() {
  const auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !copying_; };
  const absl::Time start = absl::Now();
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&idle));
  return absl::ToDoubleSeconds(absl::Now() - start);
}

}  // namespace ringleader::optim
