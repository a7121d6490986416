// The sharded optimizer on CPU ranks: against the paper's algorithm, with parameters whole and
// sharded, on any number of ranks.
#include "worker/optim/sharded/sharded_adamw.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <memory>

#include "absl/time/clock.h"
#include "worker/comm/testing/local_communicator.h"
#include "worker/model/decoder/decoder.h"
#include "worker/model/testing/dense_context_attention.h"
#include "worker/model/token_ops/cpu_token_ops.h"
#include "worker/optim/cpu_shard_device.h"
#include "worker/optim/sharded/testing/small_model.h"

namespace ringleader::optim {
namespace {

using comm::Communicator;
using comm::testing::RunRanks;
using model::ParameterSharding;
using testing::Each;
using testing::ElementsAreArray;
using testing::HasSubstr;
using torch::Tensor;

constexpr ParameterSharding kShardings[] = {ParameterSharding::kWhole, ParameterSharding::kShard};

// A matrix of 5 x 7 and a norm of 9, with the gaps that alignment leaves; a block each.
model::ParameterLayout Layout() {
  return {.slots = {{.name = "matrix", .shape = {5, 7}, .offset = 0, .elements = 35},
                    {.name = "norm", .shape = {9}, .offset = 48, .elements = 9}},
          .elements = 64,
          .blocks = {{.begin = 0, .elements = 48}, {.begin = 48, .elements = 16}}};
}

// A rank's device and optimizer, from random start weights.
class Rank {
 public:
  Rank(Communicator& comm, const AdamWOptions& options, ParameterSharding sharding,
       const model::ParameterLayout& layout = Layout(), uint32_t seed = 1, float scale = 1.0f)
      : layout_(layout), device_(comm, /*threads=*/2) {
    std::vector<float> start = Random(layout, layout.PaddedElements(comm.size()), seed);
    for (float& value : start) value *= scale;
    const int64_t elements = layout.ShardElements(comm.size());
    auto adamw =
        ShardedAdamW::Create(options, layout, device_, torch::kFloat,
                             std::span(start).subspan(comm.rank() * elements, elements), sharding);
    TORCH_CHECK(adamw.ok(), std::string(adamw.status().message()));
    adamw_ = *std::move(adamw);
  }

  ShardedAdamW& operator*() { return *adamw_; }
  ShardedAdamW* operator->() { return adamw_.get(); }

  // A step of this gradient, which every rank adds for the one token that it labels.
  absl::StatusOr<ShardedStep> Step(double rate, const std::vector<float>& gradients) {
    adamw_->ZeroGradients();
    AddGradients(*adamw_, layout_, gradients);
    return adamw_->Step(rate, torch::ones({}), 1);
  }

  // All ranks' parameters as forward reads them, after a check that they are the master weights.
  std::vector<float> Parameters() {
    std::vector<float> master(layout_.elements);
    EXPECT_TRUE(adamw_->GatherMaster(master.data()).ok());
    for (size_t b = 0; b < layout_.blocks.size(); ++b) {
      const model::ParameterBlock& range = layout_.blocks[b];
      const Tensor read = adamw_->Parameters(static_cast<int>(b), -1);
      EXPECT_TRUE(torch::equal(read, torch::from_blob(&master[range.begin], {range.elements})));
    }
    return master;
  }

 private:
  const model::ParameterLayout layout_;
  CpuShardDevice device_;
  std::unique_ptr<ShardedAdamW> adamw_;
};

TEST(CpuShardDeviceTest, WaitsAreOfTheModelUntilAnUpdateBeginsAndAgainAfterIt) {
  RunRanks(2, [](Communicator& comm) {
    CpuShardDevice device(comm, /*threads=*/1);
    // Rank 0 waits for rank 1, which comes late.
    const auto sum_late = [&] {
      if (comm.rank() == 1) absl::SleepFor(absl::Milliseconds(20));
      EXPECT_TRUE(device.AllReduceSum(torch::ones({4}, torch::kDouble)).ok());
    };
    for (int step = 0; step < 2; ++step) {
      sum_late();
      const ShardDevice::Waits of_model = device.TakeWaits().value();
      device.BeginUpdate();
      sum_late();
      const ShardDevice::Waits of_update = device.TakeWaits().value();
      if (comm.rank() == 1) continue;
      EXPECT_GT(of_model.model, 0) << step;
      EXPECT_EQ(of_model.update, 0) << step;
      EXPECT_EQ(of_update.model, 0) << step;
      EXPECT_GT(of_update.update, 0) << step;
    }
  });
}

struct Outcome {
  std::vector<float> parameters;  // [layout.elements], rank 0's
  std::vector<ShardedStep> steps;
};

Outcome Train(int ranks, int steps, const AdamWOptions& options,
              ParameterSharding sharding = ParameterSharding::kWhole) {
  Outcome run;
  RunRanks(ranks, [&](Communicator& comm) {
    Rank rank(comm, options, sharding);
    for (int step = 0; step < steps; ++step) {
      const auto result = rank.Step(0.01, Random(Layout(), 64, 100 + step));
      if (!result.ok()) throw std::runtime_error(std::string(result.status().message()));
      if (comm.rank() == 0) run.steps.push_back(*result);
    }
    const std::vector<float> parameters = rank.Parameters();
    if (comm.rank() == 0) run.parameters = parameters;
  });
  return run;
}

// The paper's algorithm 2, in fp64 and on one rank.
std::vector<double> Reference(int steps, const AdamWOptions& o) {
  const model::ParameterLayout layout = Layout();
  const std::vector<float> start = Random(layout, layout.elements, 1);
  std::vector<double> p(start.begin(), start.end()), m(p.size()), v(p.size());
  for (int step = 0; step < steps; ++step) {
    const std::vector<float> g = Random(layout, layout.elements, 100 + step);
    double norm = 0.0;
    for (const float x : g) norm += static_cast<double>(x) * x;
    norm = std::sqrt(norm);
    const double scale = o.clip_norm > 0 && norm > o.clip_norm ? o.clip_norm / norm : 1.0;
    for (const model::ParameterSlot& slot : layout.slots) {
      for (int64_t i = slot.offset; i < slot.offset + slot.elements; ++i) {
        const double gradient = g[i] * scale;
        m[i] = o.beta1 * m[i] + (1 - o.beta1) * gradient;
        v[i] = o.beta2 * v[i] + (1 - o.beta2) * gradient * gradient;
        const double m_hat = m[i] / (1 - std::pow(o.beta1, step + 1));
        const double v_hat = v[i] / (1 - std::pow(o.beta2, step + 1));
        const double decay = slot.is_matrix() ? o.weight_decay * p[i] : 0.0;
        p[i] -= 0.01 * (m_hat / (std::sqrt(v_hat) + o.epsilon) + decay);
      }
    }
  }
  return p;
}

TEST(CpuAdamWTest, FollowsThePaperOnAnyNumberOfRanks) {
  for (const AdamWOptions& options : {AdamWOptions{.weight_decay = 0.3, .clip_norm = 0.0},
                                      {.weight_decay = 0.3, .clip_norm = 1.0},
                                      {.beta1 = 0.6, .beta2 = 0.8, .epsilon = 0.05}}) {
    const std::vector<double> expected = Reference(5, options);
    for (const int ranks : {1, 2, 3, 4}) {
      for (const ParameterSharding sharding : kShardings) {
        const Outcome run = Train(ranks, 5, options, sharding);
        for (size_t i = 0; i < expected.size(); ++i) {
          ASSERT_NEAR(run.parameters[i], expected[i], 1e-5) << ranks << " ranks, element " << i;
        }
      }
    }
  }
}

TEST(CpuAdamWTest, SameBitsInEveryRun) {
  for (const ParameterSharding sharding : kShardings) {
    EXPECT_THAT(Train(4, 3, {}, sharding).parameters,
                ElementsAreArray(Train(4, 3, {}, sharding).parameters));
  }
}

TEST(CpuAdamWTest, ReportsTheNormBeforeClipping) {
  double squares = 0.0;
  for (const float g : Random(Layout(), 64, 100)) squares += static_cast<double>(g) * g;
  EXPECT_NEAR(Train(2, 1, {.clip_norm = 0.5}).steps[0].gradient_norm, std::sqrt(squares), 1e-4);
}

TEST(CpuAdamWTest, OneBadValueOnOneRankSkipsTheStepOnAll) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const ParameterSharding sharding : kShardings) {
      RunRanks(3, [&](Communicator& comm) {
        Rank rank(comm, {}, sharding);
        const std::vector<float> before = rank.Parameters();
        std::vector<float> gradients = Random(Layout(), 64, 2);
        if (comm.rank() == 1) gradients[50] = bad;
        const auto step = rank.Step(0.1, gradients);
        ASSERT_TRUE(step.ok()) << step.status();
        EXPECT_TRUE(step->skipped);
        EXPECT_EQ(rank->updates(), 0);
        EXPECT_THAT(rank.Parameters(), ElementsAreArray(before));
        EXPECT_THAT(TakeShard(*rank)->first_moment, Each(0.0f));
        const bool owner = rank->shard_begin() <= 50 && 50 < rank->shard_begin() + 32;
        EXPECT_EQ(rank->NonFiniteParameter(), owner ? 1 : -1);
      });
    }
  }
}

TEST(CpuAdamWTest, AStepWithoutTokensChangesNothing) {
  RunRanks(2, [](Communicator& comm) {
    Rank rank(comm, {}, ParameterSharding::kWhole);
    const std::vector<float> before = rank.Parameters();
    const auto step = rank->Step(0.1, torch::zeros({}), 0);
    ASSERT_TRUE(step.ok()) << step.status();
    EXPECT_TRUE(step->skipped);
    EXPECT_EQ(step->tokens, 0.0);
    EXPECT_THAT(rank.Parameters(), ElementsAreArray(before));
  });
}

TEST(CpuAdamWTest, SumsAreExactBeyondWhatFp32Counts) {
  RunRanks(2, [](Communicator& comm) {
    Rank rank(comm, {}, ParameterSharding::kWhole);
    // Together an odd number of more than 24 bits.
    const int64_t labels = (int64_t{1} << 25) + comm.rank();
    const auto step = rank->Step(0.1, torch::full({}, 3.0 * labels, torch::kDouble), labels);
    ASSERT_TRUE(step.ok()) << step.status();
    EXPECT_EQ(step->tokens, std::ldexp(1.0, 26) + 1);
    EXPECT_EQ(step->loss, 3.0);
  });
}

TEST(CpuAdamWTest, RestoredStateGoesOnAsIfNothingHappened) {
  for (const ParameterSharding sharding : kShardings) {
    const Outcome undisturbed = Train(2, 4, {}, sharding);
    RunRanks(2, [&](Communicator& comm) {
      const auto train = [&](Rank& rank, int begin, int end) {
        for (int step = begin; step < end; ++step) {
          ASSERT_TRUE(rank.Step(0.01, Random(Layout(), 64, 100 + step)).ok());
        }
      };
      Rank first(comm, {}, sharding);
      train(first, 0, 2);
      absl::StatusOr<ShardSource> source = first->Snapshot();
      ASSERT_TRUE(source.ok()) << source.status();
      const int64_t updates = first->updates();
      train(first, 2, 3);  // a snapshot is of its time
      const absl::StatusOr<OptimizerShard> shard = (*std::move(source))();
      ASSERT_TRUE(shard.ok()) << shard.status();
      Rank second(comm, {}, sharding, Layout(), /*seed=*/7);
      ASSERT_TRUE(second->Restore(*shard, updates).ok());
      train(second, 2, 4);
      EXPECT_THAT(second.Parameters(), ElementsAreArray(undisturbed.parameters));

      const absl::Status status = second->Restore(
          {.begin = 1, .master = {0.0f}, .first_moment = {}, .second_moment = {}}, 1);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(status.message()), HasSubstr("does not fit rank"));
    });
  }
}

// A rank with fewer micro-batches passes the others'.
TEST(CpuAdamWTest, RanksMayAddUpDifferentNumbersOfMicroBatches) {
  std::vector<std::vector<float>> results;
  for (const auto& [first, second] : {std::pair(1, 3), std::pair(2, 2)}) {
    std::vector<float> result;
    RunRanks(2, [&, first = first, second = second](Communicator& comm) {
      Rank rank(comm, {}, ParameterSharding::kWhole);
      const int count = comm.rank() == 0 ? first : second;
      for (int i = 0; i < count; ++i) AddGradients(*rank, Layout(), Random(Layout(), 64, 100));
      for (int i = count; i < std::max(first, second); ++i) rank->PassMicroBatch();
      ASSERT_TRUE(rank->Step(0.01, torch::ones({}) * count, count).ok());
      const std::vector<float> parameters = rank.Parameters();
      if (comm.rank() == 0) result = parameters;
    });
    results.push_back(result);
  }
  for (size_t i = 0; i < results[0].size(); ++i) EXPECT_NEAR(results[0][i], results[1][i], 1e-6);
}

// The small model's parameters after a few steps on ranks that see sequences of their own, as many
// each or not, and sum gradients once a step or not.
Tensor TrainModel(int ranks, ParameterSharding sharding, bool is_even, bool once,
                  const model::DecoderOptions& options = {}, int step_without_casts = -1) {
  const model::ParameterLayout layout = model::MakeParameterLayout(SmallModel());
  constexpr int kSequences = 12, kSteps = 3, kOfFirst = 7;
  // The last of three uneven ranks has none.
  const auto owner = [&](int s) {
    if (is_even || ranks == 1) return s % ranks;
    return s < kOfFirst ? 0 : 1 + s % std::max(1, ranks - (ranks == 3 ? 2 : 1));
  };
  std::vector<float> result;
  RunRanks(ranks, [&](Communicator& comm) {
    const torch::NoGradGuard no_grad;
    Rank rank(comm, {.clip_norm = 0.1}, sharding, layout, /*seed=*/1, /*scale=*/0.1f);
    if (once) rank->SumOnceAStep();
    const auto ops = model::NewCpuTokenOps(/*threads=*/1);
    model::Decoder decoder(SmallModel(), *ops, *rank, options);
    model::DenseContextAttention attention;
    int all = 0;
    for (int s = 0; s < kSequences; ++s) all += owner(s) == comm.rank();
    for (int step = 0; step < kSteps; ++step) {
      decoder.SetReadsCasts(step != step_without_casts);
      rank->ZeroGradients();
      Tensor loss = torch::zeros({}, torch::kDouble);
      int64_t count = 0;
      int mine = 0;
      for (int s = 0; s < kSequences; ++s) {
        if (owner(s) != comm.rank()) continue;
        if (++mine == all) rank->LastMicroBatch();
        const int64_t n = 24;
        const Tensor tokens = (torch::arange(n) * (s + 3) + step * 7) % 61;
        loss += decoder.ForwardBackward({.tokens = tokens,
                                         .positions = torch::arange(n),
                                         .labels = tokens.roll(-1),
                                         .sequence_length = n},
                                        attention);
        count += n;
      }
      const int meetings = once ? 1 : is_even ? mine : kOfFirst;
      for (; ranks > 1 && mine < meetings; ++mine) rank->PassMicroBatch();
      const auto update = rank->Step(0.01, loss, count);
      ASSERT_TRUE(update.ok()) << update.status();
      EXPECT_FALSE(update->skipped);
    }
    // One rank evaluates; where parameters are sharded it needs the others.
    if (comm.rank() == ranks - 1) {
      const Tensor tokens = torch::arange(24);
      const model::TokenScores scores = decoder.Score(
          {.tokens = tokens, .positions = tokens, .labels = tokens.roll(-1), .sequence_length = 24},
          attention);
      EXPECT_TRUE(scores.losses.isfinite().all().item<bool>());
    } else {
      rank->PassForward();
    }
    rank->SetReadsCasts(false);
    const std::vector<float> parameters = rank.Parameters();
    if (comm.rank() == 0) result = parameters;
  });
  return torch::tensor(result);
}

// On one rank, which sees all sequences in turn.
TEST(CpuAdamWTest, RanksTrainTheModelThatOneRankTrains) {
  const Tensor expected = TrainModel(1, ParameterSharding::kWhole, true, false);
  EXPECT_GT(expected.abs().max().item<double>(), 0.0);
  for (const int ranks : {2, 3, 4}) {
    for (const ParameterSharding sharding : kShardings) {
      for (const bool is_even : {true, false}) {
        for (const bool once : {false, true}) {
          if (once && sharding == ParameterSharding::kShard) continue;
          EXPECT_LE(
              (TrainModel(ranks, sharding, is_even, once) - expected).abs().max().item<double>(),
              2e-4)
              << ranks << " ranks";
        }
      }
    }
  }
}

// Casts are held whole or gathered a layer at a time: the same, also where a step reads none.
TEST(CpuAdamWTest, Fp8ReadsTheSameWeightsWherePartsOfThemAreGathered) {
  const auto train = [](int ranks, ParameterSharding sharding, model::Precision precision,
                        int step_without_casts = -1) {
    model::DecoderOptions options;
    options.precision = precision;
    const bool is_even = step_without_casts < 0;
    return TrainModel(ranks, sharding, is_even, false, options, step_without_casts);
  };
  using enum ParameterSharding;
  using enum model::Precision;
  const Tensor without = train(2, kWhole, kModelType);
  for (const int ranks : {1, 2, 3}) {
    const Tensor whole = train(ranks, kWhole, kFp8);
    EXPECT_TRUE(torch::equal(train(ranks, kShard, kFp8), whole));
    EXPECT_FALSE(torch::equal(whole, without)) << "nothing was cast";
  }
  const Tensor partly = train(3, kWhole, kFp8AllLayers, /*step_without_casts=*/1);
  EXPECT_TRUE(torch::equal(train(3, kShard, kFp8AllLayers, 1), partly));
  EXPECT_FALSE(torch::equal(train(3, kShard, kFp8AllLayers), partly));
}

// Rank 0 of two whose transfers are only counted.
class CountingDevice : public ShardDevice {
 public:
  int rank() const override { return 0; }
  int size() const override { return 2; }
  torch::Device device() const override { return torch::kCPU; }
  torch::ScalarType sum_type() const override { return torch::kDouble; }
  absl::StatusOr<ShardTransferPtr> ReduceSum(const Tensor&, const Tensor&, int) override {
    ++reductions;
    return std::make_unique<Counted>(this);
  }
  absl::StatusOr<ShardTransferPtr> AllReduceSum(const Tensor&) override { return nullptr; }
  absl::StatusOr<ShardTransferPtr> AllGather(const Tensor&) override { return nullptr; }
  absl::StatusOr<ShardTransferPtr> Broadcast(const Tensor&, int) override {
    ++broadcasts;
    return std::make_unique<Counted>(this);
  }
  absl::Status SumOfSquares(const Tensor&, const Tensor&) override { return absl::OkStatus(); }
  absl::Status Update(const AdamWOptions&, const ShardUpdate&) override { return absl::OkStatus(); }
  absl::Status ReadFigures(const Tensor&) override { return absl::OkStatus(); }
  absl::StatusOr<std::array<double, 3>> TakeFigures() override { return {{1, 1, 1}}; }
  absl::StatusOr<ShardSource> Snapshot(int64_t, const Tensor&, const Tensor&,
                                       const Tensor&) override {
    return absl::FailedPreconditionError("its tensors are nobody's state");
  }
  double AwaitSnapshot() override { return 0; }
  void BeginUpdate() override {}
  absl::StatusOr<Waits> TakeWaits() override { return Waits(); }

  int reductions = 0, broadcasts = 0, awaited = 0;

 private:
  struct Counted : ShardTransfer {
    explicit Counted(CountingDevice* counts) : device(counts) {}
    absl::Status Await() override {
      ++device->awaited;
      return absl::OkStatus();
    }
    CountingDevice* const device;
  };
};

// A rank in its last micro-batch goes through backward whether or not others have come to theirs;
// with a layer's buffer shared by every other layer it has to wait for them.
TEST(SumOnceAStepTest, NoLayerWaitsForAnothersSum) {
  const model::ParameterLayout layout = model::MakeParameterLayout(SmallModel());
  const std::vector<float> start(layout.ShardElements(2));
  for (const bool once : {true, false}) {
    CountingDevice device;
    const auto adamw = ShardedAdamW::Create({}, layout, device, torch::kFloat, start);
    ASSERT_TRUE(adamw.ok()) << adamw.status();
    if (once) (*adamw)->SumOnceAStep();
    for (int step = 0; step < 2; ++step) {
      device.reductions = device.awaited = 0;
      (*adamw)->ZeroGradients();
      EXPECT_EQ(device.awaited, 0) << "the step before has seen to all";
      (*adamw)->LastMicroBatch();
      AddGradients(**adamw, layout, Random(layout, layout.elements, 3));
      EXPECT_GE(device.reductions, static_cast<int>(layout.blocks.size()));
      if (once) {
        EXPECT_EQ(device.awaited, 0);
      } else {
        EXPECT_GT(device.awaited, 0);
      }
      ASSERT_TRUE((*adamw)->Step(0.01, torch::ones({}, torch::kDouble), 1).ok());
      EXPECT_EQ(device.awaited, device.reductions);
    }
  }
}

// What is held whole is on its way together; only what takes its memory waits for it.
TEST(HeldCastsTest, NoBlockWaitsForAnothers) {
  const model::ParameterLayout layout = model::MakeParameterLayout(SmallModel());
  const std::vector<float> start(layout.ShardElements(2));
  CountingDevice device;
  const auto ops = model::NewCpuTokenOps(/*threads=*/1);
  const auto adamw = ShardedAdamW::Create({}, layout, device, torch::kFloat, start);
  ASSERT_TRUE(adamw.ok()) << adamw.status();
  (*adamw)->HoldCasts(*ops, {.begin = 0, .end = SmallModel().layers});
  EXPECT_GE(device.broadcasts, static_cast<int>(layout.blocks.size()));
  EXPECT_EQ(device.awaited, 0);
  for (const bool reads_casts : {false, true}) {
    const int under_way = device.broadcasts;
    (*adamw)->SetReadsCasts(reads_casts);
    EXPECT_EQ(device.broadcasts, 2 * under_way);
    EXPECT_EQ(device.awaited, under_way);
    device.broadcasts = under_way;
    device.awaited = 0;
  }
}

}  // namespace
}  // namespace ringleader::optim
