// Budgets that are adapted and moved on the device: the arithmetic is the CPU engine's, bit for
// bit.
#include <gtest/gtest.h>

#include <vector>

#include "kernels/index/gates/block_steps.h"
#include "kernels/index/select.h"
#include "kernels/index/testing/index_fixture.h"
#include "kernels/reference/gates/block_gate.h"
#include "kernels/reference/index/index_select.h"

namespace ringleader::kernels::index {
namespace {

TEST_F(IndexTest, AdaptedBudgetsEqualTheReference) {
  for (const int heads : {1, 4, 16, 31}) {
    std::vector<IndexMass> masses(heads);
    std::vector<double> recall;
    std::vector<int32_t> counts;
    for (IndexMass& mass : masses) {
      mass = {.total = 1000,
              .columns = static_cast<int64_t>(random_() % 40) * 10,
              .diagonals = static_cast<int64_t>(random_() % 60) * 10};
      recall.push_back(mass.Recall());
    }
    for (int i = 0; i < 2 * heads; ++i) counts.push_back(static_cast<int32_t>(random_() % 5000));
    const DeviceBuffer<IndexMass> gpu_masses(masses);
    const DeviceBuffer<int32_t> gpu_counts(counts);
    ASSERT_EQ(AdaptBudgets(gpu_masses.data(), heads, gpu_counts.data(), nullptr), absl::OkStatus());
    reference::AdaptBudgets(recall, counts.data());
    EXPECT_EQ(gpu_counts.Read(), counts);
  }
}

// Runs a step that reads neither queries nor keys on the host and on the device.
void RunOnBoth(const BlockStep& host, const BlockStep& device) {
  reference::Engine engine(1);
  reference::RunBlockStep(engine, TokenMajor<const float>(), TokenMajor<const float>(), host);
  const TokenMajor<const __nv_bfloat16> none;
  EXPECT_EQ(RunBlockStep(none, none, device, nullptr, nullptr), absl::OkStatus());
}

TEST_F(IndexTest, MovedBudgetsEqualTheReference) {
  for (const int heads : {1, 16, 300}) {
    std::vector<HeadChoice> before(heads), moved(heads);
    for (int head = 0; head < heads; ++head) {
      const auto mass = static_cast<int64_t>(random_() % (1u << 28));
      before[head] = {.columns = static_cast<int64_t>(random_() % 5000),
                      .column_mass = mass / 3,
                      .diagonal_tiles = static_cast<int64_t>(random_() % 100000),
                      .diagonal_mass = mass / 2,
                      .total = mass + 1};
      moved[head] = before[head];
      moved[head].column_mass -= before[head].column_mass / (1 + random_() % 20);
      moved[head].diagonal_mass -= before[head].diagonal_mass / (1 + random_() % 20);
    }
    const DeviceBuffer<HeadChoice> gpu_before(before), gpu_moved(moved);
    const std::vector<int64_t> works = {100, 250, 160, 90};
    const DeviceBuffer<int64_t> gpu_works(works), gpu_work(1);
    const DeviceBuffer<float> gpu_factor(1), gpu_masses(2 * heads);
    const DeviceBuffer<int32_t> gpu_counts(2 * heads);
    float factor = 0.0f;
    std::vector<float> masses(2 * heads);
    std::vector<int32_t> counts(2 * heads);
    int64_t work = 0;
    for (const Anchor anchor : {Anchor::kMin, Anchor::kMean, Anchor::kMax}) {
      FindMoveStep find = {.works = works.data(),
                           .ranks = 4,
                           .rank = 1,
                           .anchor = anchor,
                           .wanted = 1.1f,
                           .factor = &factor};
      FindMoveStep gpu_find = find;
      gpu_find.works = gpu_works.data();
      gpu_find.factor = gpu_factor.data();
      RunOnBoth(find, gpu_find);
      EXPECT_EQ(gpu_factor.Read()[0], factor);
      RunOnBoth(MoveBudgetsStep{.choices = before.data(),
                                .heads = heads,
                                .factor = &factor,
                                .masses = masses.data(),
                                .counts = counts.data()},
                MoveBudgetsStep{.choices = gpu_before.data(),
                                .heads = heads,
                                .factor = gpu_factor.data(),
                                .masses = gpu_masses.data(),
                                .counts = gpu_counts.data()});
      EXPECT_EQ(gpu_masses.Read(), masses);
      EXPECT_EQ(gpu_counts.Read(), counts);
      RunOnBoth(HoldMassStep{.before = before.data(),
                             .moved = moved.data(),
                             .heads = heads,
                             .tolerance = 0.1f,
                             .masses = masses.data(),
                             .counts = counts.data()},
                HoldMassStep{.before = gpu_before.data(),
                             .moved = gpu_moved.data(),
                             .heads = heads,
                             .tolerance = 0.1f,
                             .masses = gpu_masses.data(),
                             .counts = gpu_counts.data()});
      EXPECT_EQ(gpu_masses.Read(), masses);
      EXPECT_EQ(gpu_counts.Read(), counts);
    }
    RunOnBoth(
        SumChoicesStep{.choices = before.data(), .heads = heads, .blocks = 512, .work = &work},
        SumChoicesStep{
            .choices = gpu_before.data(), .heads = heads, .blocks = 512, .work = gpu_work.data()});
    EXPECT_EQ(gpu_work.Read()[0], work);
  }
}

// Rows keep their own block and others.
TEST_F(IndexTest, WorkOfChosenBlocksEqualsTheReference) {
  for (const int heads : {1, 16, 300}) {
    const ShardLayout layout = {
        .kind = LayoutKind::kStriped, .ranks = 4, .rank = 2, .stripe = 128, .tokens = 16384};
    const int64_t query_tiles = layout.local_tokens() / 64;
    const int32_t words = BlockWords(16384 / 256);
    std::vector<uint32_t> chosen(heads * query_tiles * words);
    for (int64_t row = 0; row < heads * query_tiles; ++row) {
      const int64_t own = layout.Position(row % query_tiles * 64) / 256;
      chosen[row * words + own / 32] |= 1u << own % 32;
      for (int64_t block = 0; block < own; ++block) {
        if (random_() % 3 == 0) chosen[row * words + block / 32] |= 1u << block % 32;
      }
    }
    const DeviceBuffer<uint32_t> gpu_chosen(chosen);
    const DeviceBuffer<int64_t> gpu_work(1);
    int64_t work = 0;
    CountWorkStep count = {.chosen = chosen.data(),
                           .query_layout = layout,
                           .heads = heads,
                           .tile = 64,
                           .block_size = 256,
                           .work = &work};
    CountWorkStep gpu_count = count;
    gpu_count.chosen = gpu_chosen.data();
    gpu_count.work = gpu_work.data();
    RunOnBoth(count, gpu_count);
    EXPECT_EQ(gpu_work.Read()[0], work);
    EXPECT_GT(work, 0);
  }
}

}  // namespace
}  // namespace ringleader::kernels::index
