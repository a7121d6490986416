#include "worker/comm/testing/fake_gpu.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "worker/comm/nccl/nccl_library.h"

namespace ringleader::comm {
namespace testing {
namespace {

constexpr size_t kTotalBytes = size_t{80} << 30;

// What a thread has made and called.
struct Thread {
  std::vector<std::string> calls;
  uintptr_t streams = 0, events = 0, comms = 0, memories = 0, handles = 0;
};
thread_local Thread thread;

template <typename... Args>
void Log(const absl::FormatSpec<Args...>& format, const Args&... args) {
  thread.calls.push_back(absl::StrFormat(format, args...));
}

template <typename Handle>
uintptr_t Number(Handle handle) {
  return reinterpret_cast<uintptr_t>(handle);
}

template <typename Handle>
Handle Next(uintptr_t* made) {
  return static_cast<Handle>(At(++*made));
}

cudaError_t Memory(void** data, size_t bytes, const char* whose) {
  if (TheFakeGpu().is_full) return cudaErrorMemoryAllocation;
  *data = At(1000 * ++thread.memories);
  Log("%s gives %d", whose, bytes);
  return cudaSuccess;
}

std::string Elements(size_t count, ncclDataType_t type) {
  return absl::StrFormat("%d of type %d", count, static_cast<int>(type));
}

std::string Where(ncclComm_t comm, cudaStream_t stream) {
  return absl::StrFormat("by c%d on s%d", Number(comm), Number(stream));
}

std::string Between(const void* from, const void* to) {
  return absl::StrFormat("from %d to %d", Number(from), Number(to));
}

NcclLibrary FakeNccl() {
  NcclLibrary nccl{};
  nccl.get_unique_id = [](ncclUniqueId* id) {
    id->internal[0] = static_cast<char>(++TheFakeGpu().ids);
    return ncclSuccess;
  };
  nccl.get_error_string = [](ncclResult_t result) {
    return result == ncclRemoteError ? "remote error" : "another error";
  };
  nccl.get_last_error = [](ncclComm_t) { return "a socket closed"; };
  nccl.comm_init_rank_config = [](ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                  ncclConfig_t* config) {
    *comm = Next<ncclComm_t>(&thread.comms);
    Log("c%d is rank %d of %d, id %d, blocking %d, blocks %d", Number(*comm), rank, ranks,
        static_cast<int>(id.internal[0]), config->blocking, config->maxCTAs);
    return ncclInProgress;
  };
  nccl.comm_get_async_error = [](ncclComm_t, ncclResult_t* state) {
    *state = TheFakeGpu().state;
    return ncclSuccess;
  };
  nccl.comm_finalize = [](ncclComm_t comm) {
    Log("finalize c%d", Number(comm));
    return TheFakeGpu().finalize.load();
  };
  nccl.comm_destroy = [](ncclComm_t comm) {
    Log("destroy c%d", Number(comm));
    ++TheFakeGpu().destroyed;
    return ncclSuccess;
  };
  nccl.comm_abort = [](ncclComm_t comm) {
    Log("abort c%d", Number(comm));
    ++TheFakeGpu().aborted;
    return ncclSuccess;
  };
  nccl.mem_alloc = [](void** data, size_t bytes) {
    return Memory(data, bytes, "nccl") == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
  };
  nccl.mem_free = [](void*) {
    Log("nccl takes it back");
    return ncclSuccess;
  };
  nccl.comm_register = [](const ncclComm_t comm, void*, size_t bytes, void** handle) {
    *handle = Next<void*>(&thread.handles);
    Log("register %d with c%d", bytes, Number(comm));
    return ncclSuccess;
  };
  nccl.comm_deregister = [](const ncclComm_t comm, void* handle) {
    Log("deregister %d from c%d", Number(handle), Number(comm));
    return ncclSuccess;
  };
  nccl.group_start = [] {
    Log("{");
    return ncclSuccess;
  };
  nccl.group_end = [] {
    Log("}");
    return TheFakeGpu().group_end.load();
  };
  nccl.send = [](const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                 cudaStream_t stream) {
    Log("send %s at %d to %d %s", Elements(count, type), Number(data), peer, Where(comm, stream));
    return ncclSuccess;
  };
  nccl.recv = [](void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                 cudaStream_t stream) {
    Log("receive %s at %d from %d %s", Elements(count, type), Number(data), peer,
        Where(comm, stream));
    return ncclSuccess;
  };
  nccl.all_reduce = [](const void* send, void* receive, size_t count, ncclDataType_t type,
                       ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
    Log("all-reduce %d %s %s %s", static_cast<int>(reduction), Elements(count, type),
        Between(send, receive), Where(comm, stream));
    return TheFakeGpu().reduction.load();
  };
  nccl.all_gather = [](const void* send, void* receive, size_t count, ncclDataType_t type,
                       ncclComm_t comm, cudaStream_t stream) {
    Log("all-gather %s %s %s", Elements(count, type), Between(send, receive), Where(comm, stream));
    return ncclSuccess;
  };
  nccl.reduce_scatter = [](const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
    Log("reduce-scatter %d %s %s %s", static_cast<int>(reduction), Elements(count, type),
        Between(send, receive), Where(comm, stream));
    return ncclSuccess;
  };
  nccl.reduce = [](const void* send, void* receive, size_t count, ncclDataType_t type,
                   ncclRedOp_t reduction, int root, ncclComm_t comm, cudaStream_t stream) {
    Log("reduce %d %s %s at %d %s", static_cast<int>(reduction), Elements(count, type),
        Between(send, receive), root, Where(comm, stream));
    return ncclSuccess;
  };
  nccl.broadcast = [](const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                      ncclComm_t comm, cudaStream_t stream) {
    Log("broadcast %s %s of %d %s", Elements(count, type), Between(send, receive), root,
        Where(comm, stream));
    return ncclSuccess;
  };
  return nccl;
}

}  // namespace

FakeGpu& TheFakeGpu() {
  static FakeGpu gpu;
  return gpu;
}

void ResetFakeGpu() {
  FakeGpu& gpu = TheFakeGpu();
  gpu.events = cudaErrorNotReady;
  gpu.reached_events = 0;
  gpu.state = gpu.finalize = gpu.reduction = gpu.group_end = ncclSuccess;
  gpu.is_full = false;
  gpu.free_bytes = kTotalBytes / 2;
  gpu.ids = gpu.destroyed = gpu.aborted = gpu.events_made = 0;
  thread = {};
}

std::vector<std::string> TakeCalls() {
  return std::exchange(thread.calls, {});
}

extern "C" {

cudaError_t cudaSetDevice(int device) {
  Log("device %d", device);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  Log("forget the last error");
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "no memory" : "broken";
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "out of order";
}
cudaError_t cudaDeviceSynchronize() {
  Log("synchronize");
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  *stream = Next<cudaStream_t>(&thread.streams);
  Log("s%d has priority %d%s", Number(*stream), priority,
      flags == cudaStreamNonBlocking ? "" : ", blocking");
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Log("destroy s%d", Number(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned /*flags*/) {
  Log("s%d waits for e%d", Number(stream), Number(event));
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) {
  if (TheFakeGpu().is_full) return cudaErrorMemoryAllocation;
  *event = Next<cudaEvent_t>(&thread.events);
  ++TheFakeGpu().events_made;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Log("e%d on s%d", Number(event), Number(stream));
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return Number(event) <= TheFakeGpu().reached_events ? cudaSuccess : TheFakeGpu().events.load();
}
cudaError_t cudaEventDestroy(cudaEvent_t /*event*/) {
  --TheFakeGpu().events_made;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** data, size_t bytes) {
  return Memory(data, bytes, "cuda");
}
cudaError_t cudaFree(void* /*data*/) {
  Log("cuda takes it back");
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = TheFakeGpu().free_bytes;
  *total = kTotalBytes;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind /*kind*/,
                            cudaStream_t stream) {
  Log("copy %d %s on s%d", bytes, Between(from, to), Number(stream));
  return cudaSuccess;
}
}  // extern "C"

}  // namespace testing

absl::StatusOr<const NcclLibrary*> LoadNccl() {
  static const NcclLibrary nccl = testing::FakeNccl();
  return &nccl;
}

}  // namespace ringleader::comm
