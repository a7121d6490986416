#include "bench/longca/problem.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <fstream>
#include <numeric>
#include <random>
#include <string>

#include "kernels/masks/testing/slices.h"

namespace ringleader::bench {

using kernels::Mask;
using kernels::MaskKind;
using kernels::reference::testing::ComputeMaskedAttention;
using kernels::reference::testing::MaskedAttention;
using kernels::reference::testing::RandomTensor;
using kernels::reference::testing::RelativeError;
using kernels::reference::testing::Tensor;
using kernels::reference::testing::Visible;

namespace {

std::mt19937& Seeded(uint64_t seed) {
  static std::mt19937 engine;
  engine.seed(static_cast<uint32_t>(seed));
  return engine;
}

}  // namespace

MaskedSequence::MaskedSequence(int64_t length, uint64_t seed, const DocumentLengths& lengths)
    : tokens(length), documents(lengths.Firsts(length, seed)) {}

Problem::Problem(int64_t length, uint64_t seed, const DocumentLengths& lengths)
    : MaskedSequence(length, seed, lengths),
      q(RandomTensor(length, kHeads, kHeadDim, Seeded(seed))),
      k(RandomTensor(length, kKvHeads, kHeadDim, Seeded(seed + 1))),
      v(RandomTensor(length, kKvHeads, kHeadDim, Seeded(seed + 2))),
      d_out(RandomTensor(length, kHeads, kHeadDim, Seeded(seed + 3))) {}

Mask MaskedSequence::MaskOf(MaskKind kind) const {
  const auto part = [&](int64_t of) {
    return static_cast<int32_t>(std::max<int64_t>(1, tokens / of));
  };
  const int32_t published = std::min(1024, part(4));
  return {.kind = kind,
          .window = kind == MaskKind::kGlobalSliding ? part(12) : published,
          .prefix = part(3),
          .block = published};
}

std::vector<char> Problem::Shown(const Mask& mask) const {
  const std::vector<int> pairs =
      kernels::testing::CountPairs(kernels::testing::SlicesOf(mask, tokens, documents), tokens);
  std::vector<char> shown(pairs.size());
  std::ranges::transform(pairs, shown.begin(), [](int count) { return count > 0 ? 1 : 0; });
  return shown;
}

MaskedAttention Problem::Expected(const Mask& mask, const Visible& visited) const {
  const std::vector<char> shown = Shown(mask);
  return ComputeMaskedAttention(q, k, v, d_out, 1.0f / std::sqrt(static_cast<float>(kHeadDim)),
                                [&](int head, int64_t i, int64_t j) {
                                  return shown[i * tokens + j] != 0 &&
                                         (visited == nullptr || visited(head, i, j));
                                });
}

double LargestError(const MaskedAttention& expected, const Tensor& out, const Tensor& dq,
                    const Tensor& dk, const Tensor& dv) {
  return std::max({RelativeError(out.data, expected.out), RelativeError(dq.data, expected.dq),
                   RelativeError(dk.data, expected.dk), RelativeError(dv.data, expected.dv)});
}

void FlushCaches() {
  static const std::vector<int64_t> kMore(size_t{64} << 17, 1);  // 64 MiB
  static std::atomic<int64_t> read = 0;
  read += std::accumulate(kMore.begin(), kMore.end(), int64_t{0});
}

double TakePeakMib() {
  double kib = 0;
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "VmHWM:") status >> kib;
  }
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak starts anew
  return kib / 1024;
}

}  // namespace ringleader::bench
