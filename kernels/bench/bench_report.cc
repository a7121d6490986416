#include "kernels/bench/bench_report.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <utility>

#include "absl/strings/str_join.h"
#include "kernels/fused/device_buffer.h"

namespace ringleader::kernels::bench {

using fused::CheckCuda;

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

Report::Report(std::string commit, std::vector<std::string> columns)
    : commit_(std::move(commit)), columns_(std::move(columns)) {
  cudaDeviceProp properties;
  CheckCuda(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  hardware_ = properties.name;
  const std::time_t now = std::time(nullptr);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%d", std::gmtime(&now));
  date_ = text;
}

void Report::Add(std::vector<std::string> row) {
  rows_.push_back(std::move(row));
}

void Report::PrintTable() const {
  std::vector<size_t> widths;
  for (size_t c = 0; c < columns_.size(); ++c) {
    size_t width = columns_[c].size();
    for (const auto& row : rows_) width = std::max(width, row[c].size());
    widths.push_back(width);
  }
  std::printf("%s, commit %s, %s\n", date_.c_str(), commit_.c_str(), hardware_.c_str());
  const auto print = [&](const std::vector<std::string>& row) {
    for (size_t c = 0; c < row.size(); ++c)
      std::printf("%*s  ", static_cast<int>(widths[c]), row[c].c_str());
    std::printf("\n");
  };
  print(columns_);
  for (const auto& row : rows_) print(row);
}

bool Report::WriteCsv(const std::string& path) const {
  std::ofstream file(path);
  file << "date,commit,hardware," << absl::StrJoin(columns_, ",") << "\n";
  for (const auto& row : rows_) {
    file << date_ << "," << commit_ << "," << hardware_ << "," << absl::StrJoin(row, ",") << "\n";
  }
  file.close();
  if (!file) std::fprintf(stderr, "cannot write %s\n", path.c_str());
  return static_cast<bool>(file);
}

}  // namespace ringleader::kernels::bench
