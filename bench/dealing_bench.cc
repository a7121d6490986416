// How long it takes to deal a step: prints the median of its runs, in milliseconds. With the name
// of a distribution (bench/length_distributions.h) and a number: so many of its lengths, one a
// line. bench/balance.sh runs it.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "balance/dealing.h"
#include "bench/length_distributions.h"

namespace {

int PrintLengths(const std::string& name, int count) {
  for (const auto& distribution : ringleader::bench::kLengthDistributions) {
    if (distribution.name != name) continue;
    ringleader::bench::LengthRandom random(1);
    for (int i = 0; i < count; ++i) {
      std::printf("%llu\n", static_cast<unsigned long long>(distribution.draw(random)));
    }
    return 0;
  }
  std::fprintf(stderr, "dealing_bench: there is no distribution %s\n", name.c_str());
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3) return PrintLengths(argv[1], std::atoi(argv[2]));
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
