// How long it takes to deal a step: prints the median of its runs, in milliseconds.
// bench/balance.sh runs it.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "balance/dealing.h"
#include "bench/length_distributions.h"

int main() {
  constexpr int kRuns = 21, kGroups = 1024;
  constexpr size_t kSamples = 16384;
  ringleader::bench::LengthRandom random(1);
  std::vector<uint64_t> tokens(kSamples);
  for (uint64_t& length : tokens) length = ringleader::bench::LongAlignLike(random);
  std::vector<ringleader::balance::SampleWeight> rows;
  for (uint64_t length = 1024; length <= 131072; length *= 2) {
    const auto n = static_cast<double>(length);
    rows.push_back({length, n / 1e3 + n * n / 3e7});
  }
  const auto weights = ringleader::balance::SampleWeights::Create(rows);
  if (!weights.ok()) return 1;
  std::vector<double> milliseconds;
  double imbalance = 0;
  for (int run = 0; run < kRuns; ++run) {
    const auto start = std::chrono::steady_clock::now();
    const auto dealing = ringleader::balance::Deal(
        tokens, *weights,
        {.groups = kGroups, .capacity = 131072, .multiple = 128, .one_sample = true});
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    milliseconds.push_back(took.count());
    imbalance = dealing.Imbalance();
  }
  std::nth_element(milliseconds.begin(), milliseconds.begin() + kRuns / 2, milliseconds.end());
  std::printf("{\"milliseconds\": %.2f, \"imbalance\": %.4f}\n", milliseconds[kRuns / 2],
              imbalance);
  return 0;
}
