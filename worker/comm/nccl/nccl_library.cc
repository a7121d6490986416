#include "worker/comm/nccl/nccl_library.h"

#include <dlfcn.h>

#include <string>

#include "absl/strings/str_format.h"

namespace ringleader::comm {
namespace {

constexpr char kLibrary[] = "libnccl.so.2";

absl::StatusOr<NcclLibrary> Load() {
  void* const handle = dlopen(kLibrary, RTLD_NOW | RTLD_GLOBAL);
  if (handle == nullptr) {
    return absl::UnavailableError(absl::StrFormat(
        "NCCL does not load: %s; install it, or name its folder in LD_LIBRARY_PATH", dlerror()));
  }
  NcclLibrary nccl;
  std::string missing;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr && missing.empty()) missing = name;
  };
  find(nccl.get_version, "ncclGetVersion");
  find(nccl.get_unique_id, "ncclGetUniqueId");
  find(nccl.get_error_string, "ncclGetErrorString");
  find(nccl.get_last_error, "ncclGetLastError");
  find(nccl.comm_init_rank_config, "ncclCommInitRankConfig");
  find(nccl.comm_get_async_error, "ncclCommGetAsyncError");
  find(nccl.comm_finalize, "ncclCommFinalize");
  find(nccl.comm_destroy, "ncclCommDestroy");
  find(nccl.comm_abort, "ncclCommAbort");
  find(nccl.mem_alloc, "ncclMemAlloc");
  find(nccl.mem_free, "ncclMemFree");
  find(nccl.comm_register, "ncclCommRegister");
  find(nccl.comm_deregister, "ncclCommDeregister");
  find(nccl.group_start, "ncclGroupStart");
  find(nccl.group_end, "ncclGroupEnd");
  find(nccl.send, "ncclSend");
  find(nccl.recv, "ncclRecv");
  find(nccl.all_reduce, "ncclAllReduce");
  find(nccl.all_gather, "ncclAllGather");
  find(nccl.reduce_scatter, "ncclReduceScatter");
  find(nccl.reduce, "ncclReduce");
  find(nccl.broadcast, "ncclBroadcast");
  int version = 0;
  if (!missing.empty() || nccl.get_version(&version) != ncclSuccess ||
      version < NCCL_VERSION_CODE) {
    return absl::UnavailableError(absl::StrFormat(
        "%s is version %d%s and %d or newer is needed; install nvidia-nccl-cu13 %d.%d.%d", kLibrary,
        version, missing.empty() ? "" : " without " + missing, NCCL_VERSION_CODE, NCCL_MAJOR,
        NCCL_MINOR, NCCL_PATCH));
  }
  return nccl;
}

}  // namespace

absl::StatusOr<const NcclLibrary*> LoadNccl() {
  static const absl::StatusOr<NcclLibrary> nccl = Load();
  if (!nccl.ok()) return nccl.status();
  return &*nccl;
}

}  // namespace ringleader::comm
