// What groups of keys are scored by, on the device: the bits of the CPU engine.
#include "kernels/index/groups/narrow_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/reference/gates/score_dims.h"
#include "kernels/testing/device_buffer.h"
#include "kernels/testing/gpu_test.h"

namespace ringleader::kernels::index {
namespace {

using Bf16 = __nv_bfloat16;
using ::testing::HasSubstr;

// Rows of a wider tensor, so that strides are not those of dense rows.
struct Rows {
  std::vector<float> floats;
  std::vector<Bf16> bf16;
  int64_t tokens;
  int heads, head_dim;

  template <typename T>
  TokenMajor<const T> On(const T* data) const {
    return {data, tokens, heads, head_dim, (int64_t{heads} + 1) * head_dim, head_dim};
  }
  void Set(int64_t token, int head, int dim, float value) {
    const int64_t at = (token * (heads + 1) + head) * head_dim + dim;
    bf16[at] = __float2bfloat16_rn(value);
    floats[at] = __bfloat162float(bf16[at]);
  }
};

// Dimensions differ in size, by powers of two from 2^-5 to 2^5.
Rows Random(int64_t tokens, int heads, int head_dim, std::mt19937& random) {
  std::normal_distribution<float> normal;
  const int64_t size = tokens * (heads + 1) * head_dim;
  Rows rows{.floats = std::vector<float>(size),
            .bf16 = std::vector<Bf16>(size),
            .tokens = tokens,
            .heads = heads,
            .head_dim = head_dim};
  for (int64_t i = 0; i < tokens; ++i) {
    for (int head = 0; head <= heads; ++head) {
      for (int dim = 0; dim < head_dim; ++dim) {
        rows.Set(i, head, dim, std::ldexp(normal(random), (head * head_dim + dim) * 7 % 11 - 5));
      }
    }
  }
  return rows;
}

struct Results {
  std::vector<int64_t> energy;
  std::vector<float> largest;
  std::vector<int32_t> dims;
  std::vector<float> inverses;
  std::vector<uint8_t> queries, keys;

  bool operator==(const Results&) const = default;
};

Results OnDevice(const Rows& q, const Rows& k) {
  const int64_t values = int64_t{2} * k.heads * k.head_dim;
  const DeviceBuffer<Bf16> q_rows(q.bf16), k_rows(k.bf16);
  const DeviceBuffer<int64_t> energy(values);
  const DeviceBuffer<float> largest(values), inverses(2 * k.heads);
  const DeviceBuffer<int32_t> dims(k.heads * kScoreDims);
  const DeviceBuffer<uint8_t> queries(q.tokens * q.heads * kScoreDims),
      keys(k.tokens * k.heads * kScoreDims);
  const TokenMajor<const Bf16> q_view = q.On<Bf16>(q_rows.data()),
                               k_view = k.On<Bf16>(k_rows.data());
  EXPECT_EQ(SumDimEnergy(q_view, k_view,
                         {.tokens = q.tokens,
                          .rows = q.tokens,
                          .energy = energy.data(),
                          .largest = largest.data()},
                         nullptr),
            absl::OkStatus());
  EXPECT_EQ(PickDims(k.heads, k.head_dim,
                     {.energy = energy.data(),
                      .largest = largest.data(),
                      .dims = dims.data(),
                      .inverses = inverses.data()},
                     nullptr),
            absl::OkStatus());
  EXPECT_EQ(NarrowRows(q_view, k_view,
                       {.dims = dims.data(),
                        .inverses = inverses.data(),
                        .queries = queries.data(),
                        .keys = keys.data()},
                       nullptr),
            absl::OkStatus());
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  return {energy.Read(), largest.Read(), dims.Read(), inverses.Read(), queries.Read(), keys.Read()};
}

Results OnCpu(const Rows& q, const Rows& k) {
  const int64_t values = int64_t{2} * k.heads * k.head_dim;
  Results results{std::vector<int64_t>(values),
                  std::vector<float>(values),
                  std::vector<int32_t>(k.heads * kScoreDims),
                  std::vector<float>(2 * k.heads),
                  std::vector<uint8_t>(q.tokens * q.heads * kScoreDims),
                  std::vector<uint8_t>(k.tokens * k.heads * kScoreDims)};
  reference::Engine engine(2);
  const TokenMajor<const float> q_view = q.On<float>(q.floats.data()),
                                k_view = k.On<float>(k.floats.data());
  reference::SumDimEnergy(engine, q_view, k_view,
                          {.tokens = q.tokens,
                           .rows = q.tokens,
                           .energy = results.energy.data(),
                           .largest = results.largest.data()});
  reference::PickDims(k.heads, k.head_dim,
                      {.energy = results.energy.data(),
                       .largest = results.largest.data(),
                       .dims = results.dims.data(),
                       .inverses = results.inverses.data()});
  reference::NarrowRows(engine, q_view, k_view,
                        {.dims = results.dims.data(),
                         .inverses = results.inverses.data(),
                         .queries = results.queries.data(),
                         .keys = results.keys.data()});
  return results;
}

void ExpectSame(const Rows& q, const Rows& k) {
  const Results device = OnDevice(q, k), cpu = OnCpu(q, k);
  EXPECT_EQ(device.energy, cpu.energy);
  EXPECT_EQ(device.largest, cpu.largest);
  EXPECT_EQ(device.dims, cpu.dims);
  EXPECT_EQ(device.inverses, cpu.inverses);
  EXPECT_TRUE(device.queries == cpu.queries);
  EXPECT_TRUE(device.keys == cpu.keys);
}

class NarrowRowsTest : public GpuTest {
 protected:
  std::mt19937 random_{23};
};

TEST_F(NarrowRowsTest, AreTheCpuEngines) {
  for (const int head_dim : {64, 128}) {
    for (const int64_t tokens : {3, 300, 5000}) {
      SCOPED_TRACE(::testing::Message() << tokens << " tokens of " << head_dim);
      ExpectSame(Random(tokens, 6, head_dim, random_), Random(tokens, 2, head_dim, random_));
    }
  }
}

TEST_F(NarrowRowsTest, ZerosOutliersAndWhatIsNotFinite) {
  Rows q = Random(200, 4, 128, random_), k = Random(200, 2, 128, random_);
  for (int64_t i = 0; i < 200; ++i) {
    for (int dim = 0; dim < 128; ++dim) k.Set(i, 0, dim, 0.0f);
  }
  ExpectSame(q, k);  // the products of the first KV head are all 0
  k.Set(17, 1, 100, -3e38f);
  q.Set(5, 3, 7, 1e30f);  // its square is infinite
  q.Set(6, 2, 9, 1e-39f);
  ExpectSame(q, k);
  k.Set(11, 1, 3, NAN);
  k.Set(12, 1, 4, INFINITY);
  q.Set(199, 0, 127, -INFINITY);
  ExpectSame(q, k);
}

TEST(NarrowRowsArgumentsTest, ErrorsNameTheArgumentAndWhatIsAllowed) {
  alignas(16) static Bf16 data[8];
  const auto message = [](int heads, int head_dim, int64_t stride, int64_t tokens) {
    const TokenMajor<const Bf16> q = {data, 1024, heads, head_dim, stride, head_dim},
                                 k = {data, 1024, 2, head_dim, stride, head_dim};
    return std::string(SumDimEnergy(q, k, {.tokens = tokens, .rows = 1024}, nullptr).message());
  };
  EXPECT_THAT(message(4, 80, 640, 1024), HasSubstr("head_dim is 80; 64 and 128 are supported"));
  EXPECT_THAT(message(3, 64, 640, 1024), HasSubstr("heads of q is 3"));
  EXPECT_THAT(message(4, 64, 641, 1024), HasSubstr("q and its strides is 641"));
  EXPECT_THAT(message(4, 64, 640, 1000), HasSubstr("tokens is 1000"));
  EXPECT_THAT(message(4, 64, 640, 1024), HasSubstr("energy"));
}

}  // namespace
}  // namespace ringleader::kernels::index
