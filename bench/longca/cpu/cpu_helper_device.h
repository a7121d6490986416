// Helper ranks on CPUs: the reference kernels in fp32, and transfers between threads.
#pragma once

#include <memory>
#include <span>

#include "bench/longca/ranks/helper_ranks.h"
#include "ringleader/kernels/attention.h"
#include "worker/comm/communicator.h"

namespace ringleader::bench {

// `rows`: what each query of the sequence sees. Both must outlive the device.
std::unique_ptr<HelperDevice> CreateCpuHelperDevice(std::span<const kernels::KeyIntervals> rows,
                                                    comm::Communicator* communicator);

}  // namespace ringleader::bench
