#include "kernels/bench/bench_report.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/testing/device_buffer.h"

namespace ringleader::kernels::bench {

double MedianMs(const std::function<void()>& run, int repeats) {
  for (int i = 0; i < 3; ++i) run();
  struct Interval {
    cudaEvent_t begin = nullptr, end = nullptr;
  };
  std::vector<Interval> intervals(repeats);
  for (auto& [begin, end] : intervals) {
    CheckCuda(cudaEventCreate(&begin), "cudaEventCreate");
    CheckCuda(cudaEventCreate(&end), "cudaEventCreate");
  }
  for (const auto& [begin, end] : intervals) {
    CheckCuda(cudaEventRecord(begin), "cudaEventRecord");
    run();
    CheckCuda(cudaEventRecord(end), "cudaEventRecord");
  }
  CheckCuda(cudaDeviceSynchronize(), "bench");
  std::vector<float> ms;
  ms.reserve(repeats);
  for (const auto& [begin, end] : intervals) {
    CheckCuda(cudaEventElapsedTime(&ms.emplace_back(), begin, end), "cudaEventElapsedTime");
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
  }
  std::nth_element(ms.begin(), ms.begin() + repeats / 2, ms.end());
  return ms[repeats / 2];
}

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  std::exit(1);
}

Flags ParseFlags(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--csv") flags.csv = argv[i + 1];
    if (flag == "--commit") flags.commit = argv[i + 1];
  }
  return flags;
}

Report::Report(const Flags& flags, std::vector<std::string> columns)
    : csv_(flags.csv), columns_(std::move(columns)) {
  cudaDeviceProp properties;
  CheckCuda(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  const std::time_t now = std::time(nullptr);
  char date[32];
  std::strftime(date, sizeof(date), "%Y-%m-%d", std::gmtime(&now));
  prefix_ = absl::StrCat(date, ",", flags.commit, ",", properties.name, ",");
  if (!csv_.empty()) file_.open(csv_);
  std::printf("%s, commit %s, %s\n", date, flags.commit.c_str(), properties.name);
  WriteLine("date,commit,hardware,", columns_);
}

void Report::Add(const std::vector<std::string>& row) {
  WriteLine(prefix_, row);
}

void Report::WriteLine(const std::string& prefix, const std::vector<std::string>& row) {
  // The first two columns are names.
  constexpr size_t kNames = 2, kNameWidth = 14, kNumberWidth = 8;
  for (size_t c = 0; c < row.size(); ++c) {
    const size_t width = std::max(columns_[c].size(), c < kNames ? kNameWidth : kNumberWidth);
    std::printf("%*s  ", static_cast<int>(width), row[c].c_str());
  }
  std::printf("\n");
  std::fflush(stdout);
  if (csv_.empty()) return;
  file_ << prefix << absl::StrJoin(row, ",") << std::endl;
  if (!file_) Check(absl::UnavailableError(absl::StrCat("cannot write ", csv_)));
}

}  // namespace ringleader::kernels::bench
