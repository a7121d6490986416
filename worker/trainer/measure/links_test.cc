// What is made of the times that messages take, on a device whose times the test plays.
#include "worker/trainer/measure/links.h"

#include <cstdlib>
#include <deque>
#include <functional>
#include <thread>

#include "absl/synchronization/mutex.h"
#include "base/status_macros.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/testing/local_communicator.h"

namespace ringleader::trainer {
namespace {

using ::testing::SizeIs;

// Nothing but its links is ever asked for.
class PlayedDevice : public EngineDevice {
 public:
  // Seconds of the `number`th exchange of so many bytes with a partner.
  using Seconds = std::function<absl::StatusOr<double>(int partner, size_t bytes, int number)>;
  explicit PlayedDevice(Seconds seconds) : seconds_(std::move(seconds)) {}

  absl::StatusOr<std::vector<double>> Exchange(int partner, size_t bytes, int times) override {
    std::vector<double> all;
    for (int number = 1; number <= times; ++number) {
      partners_.push_back(partner);
      ASSIGN_OR_RETURN(const double seconds, seconds_(partner, bytes, number));
      all.push_back(seconds);
    }
    ++calls_;
    return all;
  }
  balance::MachineKind Machine() const override { return {.device = "played"}; }
  bool is_host() const override { return is_host_; }

  std::string Describe() const override { return "played"; }
  torch::ScalarType type() const override { return torch::kFloat; }
  absl::StatusOr<model::MemoryLimits> FreeMemory() override { return Unasked(); }
  const model::TokenOps& token_ops() const override { std::abort(); }
  attention::ContextAttention& attention() override { std::abort(); }
  absl::Status SetAttention(const patterns::AttentionOptions&) override { return Unasked(); }
  absl::StatusOr<std::unique_ptr<attention::ContextAttention>> MakeRing(
      const patterns::AttentionOptions&) override {
    return Unasked();
  }
  absl::StatusOr<std::unique_ptr<attention::ContextAttention>> MakeAttentionAlone(
      const patterns::AttentionOptions&) override {
    return Unasked();
  }
  absl::StatusOr<std::unique_ptr<optim::ShardDevice>> MakeShardDevice() override {
    return Unasked();
  }
  absl::StatusOr<model::HostCopies*> PinHostMemory(int64_t, int64_t) override { return Unasked(); }
  torch::Tensor Upload(const std::vector<int64_t>&) override { return {}; }
  void Begin(Interval) override {}
  void End(Interval) override {}
  double TakeSeconds(Interval) override { return 0; }
  double TakeOffloadSeconds() override { return 0; }
  uint64_t PeakBytes() const override { return 0; }

  bool is_host_ = true;
  std::vector<int> partners_;
  int calls_ = 0;

 private:
  static absl::Status Unasked() { return absl::InternalError("nobody asks for it"); }

  const Seconds seconds_;
};

// 10 us and 1 GB/s, but for what a call says otherwise.
double Usual(size_t bytes) {
  return 10e-6 + 1e-9 * static_cast<double>(bytes);
}

class LinksTest : public ::testing::Test {
 protected:
  // What each rank of two nodes' four makes of `seconds`.
  void Run(const PlayedDevice::Seconds& seconds, const balance::MeasureRequest& request = {},
           bool is_host = true) {
    constexpr int kRanks = 4;
    const auto worlds = comm::testing::LocalCommunicators(kRanks);
    devices_.clear();
    links_.assign(kRanks, absl::UnknownError("not run"));
    for (int rank = 0; rank < kRanks; ++rank) {
      devices_.emplace_back(seconds).is_host_ = is_host;
    }
    std::vector<std::thread> threads;
    threads.reserve(kRanks);
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        TrainingJob job;
        job.rank = rank;
        job.world_size = kRanks;
        job.ranks_per_node = 2;
        // The others' knowledge does not count.
        links_[rank] = MeasureLinks(job, rank == 0 ? request : balance::MeasureRequest{},
                                    devices_[rank], *worlds[rank]);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  const std::vector<balance::LinkSpeed>& links() {
    EXPECT_TRUE(links_[0].ok()) << links_[0].status();
    return *links_[0];
  }

  std::deque<PlayedDevice> devices_;
  std::vector<absl::StatusOr<std::vector<balance::LinkSpeed>>> links_;
};

TEST_F(LinksTest, ABandwidthIsOfTheBytesThatAMessageHasMore) {
  Run([](int partner, size_t bytes, int) {
    return partner == 2 || partner == 0 ? 2 * Usual(bytes) : Usual(bytes);
  });
  ASSERT_THAT(links(), SizeIs(2));
  EXPECT_FALSE(links()[0].between_nodes);
  EXPECT_NEAR(links()[0].bytes_per_second, 1e9, 1);
  EXPECT_NEAR(links()[0].latency_seconds, 10e-6, 1e-12);
  EXPECT_TRUE(links()[1].between_nodes);
  EXPECT_NEAR(links()[1].bytes_per_second, 0.5e9, 1);
  EXPECT_NEAR(links()[1].latency_seconds, 20e-6, 1e-12);
  // A small and a large message, each seven times after a first: with the next rank of the node,
  // then with the first of the next node. The last rank has no part in it.
  std::vector<int> expected(16, 1);
  expected.insert(expected.end(), 16, 2);
  EXPECT_EQ(devices_[0].partners_, expected);
  EXPECT_EQ(devices_[1].partners_, std::vector<int>(16, 0));
  EXPECT_EQ(devices_[2].partners_, std::vector<int>(16, 0));
  EXPECT_THAT(devices_[3].partners_, SizeIs(0));
  // Messages of a size have one memory, for a GPU's transport takes milliseconds to learn of
  // another.
  EXPECT_EQ(devices_[0].calls_, 4);
  EXPECT_EQ(devices_[1].calls_, 2);
}

// A connection is made with the first; what is seldom counts for nothing either.
TEST_F(LinksTest, TheMedianCountsAndNotTheFirst) {
  Run([](int, size_t bytes, int number) -> absl::StatusOr<double> {
    if (number == 1) return 1.0;
    if (number <= 4) return 1e-3 * Usual(bytes);
    return number == 5 ? Usual(bytes) : 100 * Usual(bytes);
  });
  ASSERT_THAT(links(), SizeIs(2));
  EXPECT_NEAR(links()[0].bytes_per_second, 1e9, 1);
  EXPECT_NEAR(links()[0].latency_seconds, 10e-6, 1e-12);
}

TEST_F(LinksTest, NoiseMakesNoLinkFasterThanItsLargeMessages) {
  Run([](int, size_t bytes, int) { return bytes > 4096 ? 2e-3 : 3e-3; });
  ASSERT_THAT(links(), SizeIs(2));
  EXPECT_NEAR(links()[0].bytes_per_second, ((4 << 20) - 4096) / 0.2e-3, 1);
  EXPECT_GT(links()[0].latency_seconds, 2.9e-3);
  // One without any: its bytes take all of the time.
  Run([](int, size_t bytes, int) { return 1e-9 * static_cast<double>(bytes); });
  EXPECT_NEAR(links()[0].latency_seconds, 0, 1e-12);
  EXPECT_GE(links()[0].latency_seconds, 0);
}

TEST_F(LinksTest, DevicesExchangeWhatTakesTheirLinksTime) {
  size_t most = 0;
  absl::Mutex mutex;
  Run(
      [&](int, size_t bytes, int) {
        absl::MutexLock lock(&mutex);
        most = std::max(most, bytes);
        return Usual(bytes);
      },
      {}, /*is_host=*/false);
  EXPECT_EQ(most, size_t{64} << 20);
}

// By what the first rank knows: the others wait for nobody who does not come.
TEST_F(LinksTest, LinksThatAreKnownAreNotMeasured) {
  const auto usual = [](int, size_t bytes, int) { return Usual(bytes); };
  const balance::MachineKind played = {.device = "played"}, other = {.device = "other"};
  Run(usual, {.known_links_inside = {other, played}});
  ASSERT_THAT(links(), SizeIs(1));
  EXPECT_TRUE(links()[0].between_nodes);
  EXPECT_THAT(devices_[1].partners_, SizeIs(0));
  Run(usual, {.known_links_inside = {other}, .known_links_between = {played}});
  ASSERT_THAT(links(), SizeIs(1));
  EXPECT_FALSE(links()[0].between_nodes);
  EXPECT_THAT(devices_[2].partners_, SizeIs(0));
}

TEST_F(LinksTest, AnErrorOfTheTransportIsOne) {
  Run([](int, size_t bytes, int) -> absl::StatusOr<double> {
    if (bytes > 4096) return absl::UnavailableError("rank 1: its stream broke");
    return Usual(bytes);
  });
  EXPECT_EQ(links_[0].status(), absl::UnavailableError("rank 1: its stream broke"));
}

}  // namespace
}  // namespace ringleader::trainer
