#include "worker/trainer/steps/step_profiler.h"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/str_format.h"

namespace ringleader::trainer {
namespace {

using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

}  // namespace

StepProfiler::~StepProfiler() {
  if (last_ != 0) Save();
}

void StepProfiler::Start(uint64_t done, uint32_t steps) {
  if (last_ != 0) Save();
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (cuda_) activities.insert(ActivityType::CUDA);
  try {
    const ProfilerConfig config(ProfilerState::KINETO);
    torch::autograd::profiler::prepareProfiler(config, activities);
    torch::autograd::profiler::enableProfiler(config, activities);
  } catch (const std::exception& error) {
    std::printf("no trace: %s\n", error.what());
    return;
  }
  first_ = done + 1;
  last_ = done + steps;
}

void StepProfiler::StepDone(uint64_t step) {
  if (last_ != 0 && step >= last_) Save();
}

void StepProfiler::Save() {
  const std::string path =
      absl::StrFormat("%s/step-%010d-rank-%05d.json", directory_, first_, rank_);
  first_ = last_ = 0;
  // A trace gets its name only when it is whole.
  const std::string partial = directory_ + "/." + std::filesystem::path(path).filename().string();
  std::error_code error;
  try {
    const auto trace = torch::autograd::profiler::disableProfiler();
    std::filesystem::create_directories(directory_, error);
    trace->save(partial);  // by the name of partial + ".tmp"; says nothing of a full disk
    std::filesystem::rename(partial, path, error);
    if (error) {
      std::printf("no trace: %s could not be written; is the disk full?\n", path.c_str());
    } else {
      std::printf("trace: %s\n", path.c_str());
    }
  } catch (const std::exception& failure) {
    std::printf("no trace: %s\n", failure.what());
  }
  for (const char* suffix : {"", ".tmp"}) std::filesystem::remove(partial + suffix, error);
  std::fflush(stdout);
}

}  // namespace ringleader::trainer
