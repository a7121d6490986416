// Helper ranks on GPUs: the kernels that trainers run, in bf16, and transfers between GPUs.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "bench/longca/asked_mask.h"
#include "bench/longca/ranks/helper_ranks.h"
#include "ringleader/kernels/attention.h"
#include "worker/comm/device_communicator.h"

namespace ringleader::bench {

// `asked` shows each query of the sequence `rows`. `meet`: HelperDevice::Meet. Works on LibTorch's
// current stream. Throws c10::Error. The communicator must outlive the device.
std::unique_ptr<HelperDevice> CreateGpuHelperDevice(const Asked& asked,
                                                    std::span<const kernels::KeyIntervals> rows,
                                                    std::function<void()> meet,
                                                    comm::DeviceCommunicator* communicator);

}  // namespace ringleader::bench
