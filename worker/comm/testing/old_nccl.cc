// An NCCL that is whole and too old: what is asked of it is its version.
// NOLINTBEGIN(readability-identifier-naming)
extern "C" {

int ncclGetVersion(int* version) {
  *version = 20'000;
  return 0;
}

void ncclGetUniqueId() {}
void ncclGetErrorString() {}
void ncclGetLastError() {}
void ncclCommInitRankConfig() {}
void ncclCommGetAsyncError() {}
void ncclCommFinalize() {}
void ncclCommDestroy() {}
void ncclCommAbort() {}
void ncclMemAlloc() {}
void ncclMemFree() {}
void ncclCommRegister() {}
void ncclCommDeregister() {}
void ncclGroupStart() {}
void ncclGroupEnd() {}
void ncclSend() {}
void ncclRecv() {}
void ncclAllReduce() {}
void ncclAllGather() {}
void ncclReduceScatter() {}
void ncclReduce() {}
void ncclBroadcast() {}
}
// NOLINTEND(readability-identifier-naming)
