// The order in which the runner asks a device for hops, waits and arithmetic: on GPUs the order in
// which work is enqueued, and so what hides behind what.
#include "worker/attention/runner/ring_runner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "patterns/pattern.h"

namespace ringleader::attention {
namespace {

using Log = std::vector<std::string>;

class LoggingSlots : public RingSlots {
 public:
  LoggingSlots(std::string name, Log* log) : name_(std::move(name)), log_(*log) {}
  void* memory(int slot) const override { return const_cast<char*>(&memory_[slot]); }
  void Gather() {
    log_.push_back(absl::StrCat("gather ", name_));
    Track(0, kEverySlot, Wait("all"));
  }

 protected:
  absl::StatusOr<Arrival> Send(const ring::RingHop& hop) override {
    log_.push_back(absl::StrCat(hop.link == ring::RingLink::kOuter ? "outer " : "", "hop ", name_,
                                " ", hop.send_slot, ">", hop.receive_slot));
    return Wait(absl::StrCat(hop.receive_slot));
  }
  absl::StatusOr<Arrival> SendRows(const ring::RingHop& hop, const ring::HopRows&) override {
    return Send(hop);
  }
  absl::Status AddRows(int to, int from, const ring::HopRows&) override {
    return AddSlot(to, from);
  }
  absl::Status ZeroSlot(int slot) override {
    log_.push_back(absl::StrCat("zero ", slot));
    return absl::OkStatus();
  }
  absl::Status AddSlot(int to, int from) override {
    log_.push_back(absl::StrCat("add ", to, "+=", from));
    return absl::OkStatus();
  }

 private:
  Arrival Wait(const std::string& slot) {
    return [this, slot] {
      log_.push_back(absl::StrCat("wait ", name_, " ", slot));
      return absl::OkStatus();
    };
  }
  const std::string name_;
  Log& log_;
  char memory_[16] = {};
};

class LoggingDevice : public AttentionDevice {
 public:
  LoggingDevice(int rank, int ranks) : rank_(rank), ranks_(ranks) {}
  int rank() const override { return rank_; }
  int ranks() const override { return ranks_; }
  absl::Status Begin(double AttentionSeconds::*phase) override {
    log.emplace_back(phase == &AttentionSeconds::index ? "index[" : "[");
    return absl::OkStatus();
  }
  absl::Status End() override {
    log.emplace_back("]");
    return absl::OkStatus();
  }
  LayerStats& StatsOf(int /*layer*/) override { return stats_; }
  void MarkMicroBatch() override { log.emplace_back("mark"); }
  AttentionStats TakeStats(const ring::RingSchedule& /*forward*/) override { return {}; }
  std::shared_ptr<const DeviceDocuments> Upload(
      std::shared_ptr<const SequenceDocuments> /*documents*/,
      const patterns::EstimateQueries& /*queries*/) override {
    return std::make_shared<DeviceDocuments>();
  }
  Log log;

 private:
  const int rank_, ranks_;
  LayerStats stats_;
};

// A layer of any pattern, without arithmetic.
class LoggingCall : public AttentionCall {
 public:
  explicit LoggingCall(LoggingDevice* device, std::string name = "")
      : log_(device->log), name_(std::move(name)) {}
  int layer() const override { return 0; }
  CallShape shape() const override {
    return {.tokens = 128, .heads = 1, .kv_heads = 1, .head_dim = 64};
  }
  int64_t tokens() const override { return shape().tokens; }
  int64_t kv_row() const override { return 64; }
  absl::StatusOr<std::unique_ptr<RingSlots>> PlaceKv(const ring::RingSchedule& schedule,
                                                     int64_t /*slot_tokens*/) override {
    log_.emplace_back("place" + name_);
    auto slots = std::make_unique<LoggingSlots>("kv" + name_, &log_);
    if (Gathers(schedule)) slots->Gather();
    return slots;
  }
  absl::Status Silence(const DeviceArray<int64_t>& rows, float value) override {
    if (rows.size > 0) log_.push_back(absl::StrCat("silence ", rows.size, " by ", value));
    is_silent_ = rows.size > 0;
    return absl::OkStatus();
  }
  absl::Status LetSpeak() override {
    return std::exchange(is_silent_, false) ? Say("let speak") : absl::OkStatus();
  }
  absl::Status StartOutput() override { return Say("output"); }
  absl::Status GatherColumns(const Step& step) override { return Say("pick up", &step); }
  absl::Status Attend(const Step& step) override { return Say("attend", &step); }
  absl::Status AttendColumns(const Step& /*own*/) override { return Say("columns"); }
  absl::Status FinishOutput() override { return Say("finish"); }
  absl::Status CountProbe(const patterns::VerticalSlash&, ProbedRows rows) override {
    return Say(rows == ProbedRows::kHeard ? "probe heard" : "probe");
  }
  absl::StatusOr<std::unique_ptr<RingSlots>> PlaceGradients(const ring::RingSchedule& /*schedule*/,
                                                            int64_t /*slot_tokens*/) override {
    return std::make_unique<LoggingSlots>("grad", &log_);
  }
  absl::Status StartGradients() override { return Say("delta"); }
  absl::Status ColumnsBackward(const Step& /*own*/) override { return Say("columns"); }
  absl::Status AttendBackward(const Step& step, void*) override { return Say("attend", &step); }
  absl::Status ScatterColumns(const Step& step, void*) override { return Say("give back", &step); }
  absl::Status FinishQueries() override { return Say("round dq"); }
  absl::Status ReturnGradients(const ring::RingSchedule&, int64_t, RingSlots&) override {
    return Say("return");
  }

  DeviceMemory Allocate(int64_t bytes) override {
    return std::make_shared<std::vector<char>>(bytes);
  }
  DeviceMemory Upload(const void*, int64_t bytes) override { return Allocate(bytes); }
  int64_t element_bytes() const override { return 2; }
  absl::Status Sum(patterns::SumType, void*, int64_t) override { return Say("sum"); }
  absl::Status Max(float*, int64_t) override { return Say("max"); }
  absl::Status Gather(void*, int64_t) override { return Say("gather"); }
  absl::Status PrepareEstimate(const patterns::VerticalSlash&) override { return Say("queries"); }
  absl::Status RowMax(const patterns::VerticalSlash&) override { return Say("row max"); }
  absl::Status RowSum(const patterns::VerticalSlash&) override { return Say("row sum"); }
  absl::Status Mass(const patterns::VerticalSlash&) override { return Say("mass"); }
  absl::Status Candidates(const patterns::VerticalSlash&) override { return Say("candidates"); }
  absl::Status Select(const patterns::VerticalSlash&, const LayerIndex&) override {
    return Say("select");
  }
  absl::Status AdaptBudgets(const patterns::VerticalSlash&) override { return Say("adapt"); }
  absl::Status NoteChoices(const patterns::VerticalSlash&, const LayerIndex&,
                           kernels::HeadChoice*) override {
    return Say("note");
  }
  absl::Status CountSelection(const patterns::VerticalSlash&, const LayerIndex&) override {
    return Say("count");
  }
  absl::Status CountRecall(const int64_t*, const int64_t*, int32_t) override {
    return Say("recall");
  }
  absl::Status CountMove(const int64_t*, const int64_t*, const float*) override {
    return Say("count move");
  }
  absl::Status Run(const kernels::BlockStep& step) override {
    constexpr const char* kNames[] = {"fixed blocks", "tile sums", "order",         "gate",
                                      "query gate",   "pack",      "antidiagonals", "energy",
                                      "pick",         "narrow",    "key groups",    "block mass",
                                      "mass gate",    "adapt",     "work",          "find move",
                                      "sum",          "move",      "hold"};
    return Say(kNames[step.index()]);
  }

 private:
  absl::Status Say(const char* what, const Step* step = nullptr) {
    log_.push_back(step == nullptr ? what
                                   : absl::StrCat(what, " ", step->slot == nullptr ? "own " : "",
                                                  step->owner.rank));
    return absl::OkStatus();
  }
  Log& log_;
  const std::string name_;
  bool is_silent_ = false;
};

// Sends what ranks attend to alone, and knows which documents are still alive.
class CarryingDevice : public LoggingDevice {
 public:
  using LoggingDevice::LoggingDevice;
  double most_carried() const override { return 1.0; }
  std::shared_ptr<const DeviceDocuments> Upload(
      std::shared_ptr<const SequenceDocuments> documents,
      const patterns::EstimateQueries& /*queries*/) override {
    auto uploaded = std::make_shared<DeviceDocuments>();
    uploaded->host = std::move(documents);
    seen.push_back(uploaded);
    return uploaded;
  }
  std::vector<std::weak_ptr<const DeviceDocuments>> seen;
};

struct Orders {
  std::string forward, started, backward;
};

Orders OrdersOf(const ring::RingShape& ring, patterns::Pattern pattern) {
  LoggingDevice device(/*rank=*/0, ring.inner * ring.outer);
  LoggingCall call(&device);
  const auto runner = RingRunner::Create({.pattern = pattern, .tile = 64, .ring = ring}, &device);
  EXPECT_TRUE(runner.ok()) << runner.status();
  const auto take = [&] { return absl::StrJoin(std::exchange(device.log, {}), ", "); };
  Orders orders;
  const auto index = (*runner)->Forward(call);
  EXPECT_TRUE(index.ok()) << index.status();
  orders.forward = take();
  EXPECT_TRUE((*runner)->StartBackward(**index, call).ok());
  orders.started = take();
  EXPECT_TRUE((*runner)->Backward(**index, call).ok());
  orders.backward = take();
  return orders;
}

TEST(RingRunnerTest, AFlatRingHidesItsHopsBehindSteps) {
  const Orders orders = OrdersOf({ring::RingKind::kFlat, 2, 1}, patterns::Pattern::kVerticalSlash);
  EXPECT_EQ(orders.forward,
            "[, place, ], index[, queries, sum, row max, max, row sum, sum, mass, sum, candidates, "
            "gather, select, count, ], [, hop kv 0>1, output, pick up own 0, attend own 0, "
            "wait kv 1, pick up 1, attend 1, columns, finish, ]");
  EXPECT_EQ(orders.started, "[, place, hop kv 0>1, ]");
  EXPECT_EQ(orders.backward,
            "[, delta, columns, wait kv 1, zero 0, attend 1, give back 1, hop grad 0>2, zero 1, "
            "attend own 0, give back own 0, wait grad 2, add 1+=2, round dq, return, ]");
}

TEST(RingRunnerTest, AHierarchicalRingHidesItsHopBetweenNodesBehindTheIndex) {
  const Orders orders = OrdersOf({ring::RingKind::kHierarchical, 2, 2}, patterns::Pattern::kDense);
  EXPECT_EQ(orders.forward,
            "[, place, outer hop kv 0>3, ], index[, ], [, hop kv 0>1, output, attend own 0, "
            "wait kv 1, attend 1, wait kv 3, hop kv 3>2, attend 2, wait kv 2, attend 3, finish, ]");
  EXPECT_EQ(orders.started, "[, place, outer hop kv 0>3, ]");
  EXPECT_EQ(orders.backward,
            "[, delta, wait kv 3, hop kv 3>1, wait kv 1, zero 0, attend 3, hop grad 0>2, "
            "hop kv 0>2, zero 4, attend 2, wait grad 2, add 4+=2, outer hop grad 4>5, wait kv 2, "
            "zero 0, attend 1, hop grad 0>2, zero 1, attend own 0, wait grad 2, add 1+=2, "
            "wait grad 5, add 1+=5, round dq, return, ]");
}

TEST(RingRunnerTest, AnAllGatherRunsBehindIndexAndOwnStep) {
  const Orders orders = OrdersOf({ring::RingKind::kAllGather, 2, 1}, patterns::Pattern::kBlockTopK);
  EXPECT_EQ(orders.forward,
            "[, place, gather kv, ], index[, tile sums, gather, order, gate, ], [, output, "
            "attend own 0, wait kv all, attend 1, finish, ]");
  EXPECT_EQ(orders.started, "[, place, gather kv, ]");
  EXPECT_EQ(orders.backward,
            "[, delta, zero 0, attend own 0, wait kv all, zero 1, attend 1, round dq, return, ]");
}

// Packed sequences do not come again: what hops carry of them is remembered for their layers alone.
TEST(RingRunnerTest, DocumentsOfSequencesThatHavePassedAreLetGo) {
  CarryingDevice device(/*rank=*/0, /*ranks=*/2);
  const auto runner =
      RingRunner::Create({.tile = 64, .ring = {ring::RingKind::kFlat, 2, 1}}, &device);
  ASSERT_TRUE(runner.ok()) << runner.status();
  for (const int64_t first : {64, 100, 130}) {
    ASSERT_TRUE((*runner)->SetDocuments(256, std::vector<int64_t>{0, first}).ok());
    LoggingCall call(&device);
    const auto index = (*runner)->Forward(call);
    ASSERT_TRUE(index.ok()) << index.status();
    ASSERT_TRUE((*runner)->Backward(**index, call).ok());
  }
  ASSERT_THAT(device.seen, ::testing::SizeIs(3));
  EXPECT_TRUE(device.seen[0].expired());
  EXPECT_TRUE(device.seen[1].expired());
  EXPECT_FALSE(device.seen[2].expired());
}

// Of heads that are attended with in groups, the next group's keys travel during all of a call.
TEST(RingRunnerTest, TheNextCallsKeysTravelDuringACall) {
  LoggingDevice device(/*rank=*/0, /*ranks=*/2);
  LoggingCall first(&device, " A"), second(&device, " B");
  const auto runner =
      RingRunner::Create({.tile = 64, .ring = {ring::RingKind::kAllGather, 2, 1}}, &device);
  ASSERT_TRUE(runner.ok()) << runner.status();
  const auto take = [&] { return absl::StrJoin(std::exchange(device.log, {}), ", "); };
  const auto index = (*runner)->Forward(first, &second);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(take(),
            "[, place A, gather kv A, ], [, place B, gather kv B, ], index[, ], [, output, "
            "attend own 0, wait kv A all, attend 1, finish, ]");
  ASSERT_TRUE((*runner)->Forward(second).ok());
  EXPECT_EQ(take(), "index[, ], [, output, attend own 0, wait kv B all, attend 1, finish, ]");
  ASSERT_TRUE((*runner)->Backward(**index, first, &second).ok());
  EXPECT_EQ(take(),
            "[, place A, gather kv A, ], [, place B, gather kv B, ], [, delta, zero 0, "
            "attend own 0, wait kv A all, zero 1, attend 1, round dq, return, ]");
  ASSERT_TRUE((*runner)->Backward(**index, second).ok());
  EXPECT_EQ(take(),
            "[, delta, zero 0, attend own 0, wait kv B all, zero 1, attend 1, round dq, return, ]");
}

// What travels of a window's keys is less than dense attention reads.
TEST(RingRunnerTest, AStartedForwardIsOfWhatItWasStartedWith) {
  LoggingDevice device(/*rank=*/0, /*ranks=*/2);
  LoggingCall call(&device);
  const auto runner = RingRunner::Create({.pattern = patterns::Pattern::kSlidingWindow,
                                          .window = 64,
                                          .tile = 64,
                                          .ring = {ring::RingKind::kFlat, 2, 1}},
                                         &device);
  ASSERT_TRUE(runner.ok()) << runner.status();
  ASSERT_TRUE((*runner)->StartForward(call).ok());
  (*runner)->SetDense(true);
  const auto dense = (*runner)->Forward(call);
  EXPECT_EQ(dense.status().code(), absl::StatusCode::kFailedPrecondition) << dense.status();
  (*runner)->SetDense(false);
  const std::vector<int64_t> firsts = {0, 100};
  ASSERT_TRUE((*runner)->SetDocuments(256, firsts, /*padding=*/0, /*prefix_ends=*/{}).ok());
  const auto of_documents = (*runner)->Forward(call);
  EXPECT_EQ(of_documents.status().code(), absl::StatusCode::kFailedPrecondition)
      << of_documents.status();
  ASSERT_TRUE((*runner)->SetDocuments(256, {}, /*padding=*/0, /*prefix_ends=*/{}).ok());
  const auto as_started = (*runner)->Forward(call);
  EXPECT_TRUE(as_started.ok()) << as_started.status();
}

// Heads get more or less by what all ranks' queries recalled, so that these agree twice.
TEST(RingRunnerTest, AnExactSearchAgreesOnWhatHeadsRecall) {
  LoggingDevice device(/*rank=*/0, /*ranks=*/2);
  LoggingCall call(&device);
  const auto runner = RingRunner::Create({.pattern = patterns::Pattern::kAdaSpa,
                                          .adapt_heads = true,
                                          .density = 0.2,
                                          .tile = 64,
                                          .ring = {ring::RingKind::kFlat, 2, 1}},
                                         &device);
  ASSERT_TRUE(runner.ok()) << runner.status();
  ASSERT_TRUE((*runner)->Forward(call).ok());
  EXPECT_THAT(absl::StrJoin(device.log, ", "),
              ::testing::HasSubstr("index[, pack, gather, order, block mass, mass gate, "
                                   "sum, sum, adapt, mass gate, sum, sum, recall, ]"));
}

// What the first of two ranks does for a forward's index.
std::string IndexOf(patterns::AttentionOptions options, uint64_t step, float move = 1.0f) {
  LoggingDevice device(/*rank=*/0, /*ranks=*/2);
  LoggingCall call(&device);
  options.ring = {ring::RingKind::kFlat, 2, 1};
  const auto runner = RingRunner::Create(options, &device);
  EXPECT_TRUE(runner.ok()) << runner.status();
  (*runner)->SetStep(step);
  (*runner)->SetMove(move);
  EXPECT_TRUE((*runner)->Forward(call).ok());
  const std::string order = absl::StrJoin(device.log, ", ");
  const size_t begin = order.find("index["), end = order.find(']', begin);
  return order.substr(begin, end - begin);
}

// Choices are moved beside the choice: ranks that choose apart tell each other once what they
// visit.
TEST(RingRunnerTest, AMoveChoosesAgain) {
  const auto index_of = [](patterns::Pattern pattern, float move, uint64_t step) {
    return IndexOf({.pattern = pattern,
                    .balance = {.anchor = kernels::Anchor::kMean, .tolerance = 0.1f},
                    .tile = 64},
                   step, move);
  };
  const std::string choice =
      "index[, queries, sum, row max, max, row sum, sum, mass, sum, candidates, gather, select, ";
  EXPECT_EQ(index_of(patterns::Pattern::kVerticalSlash, 0.7f, 1),
            choice +
                "find move, note, sum, move, select, note, sum, hold, select, note, sum, count "
                "move, count, ");
  EXPECT_EQ(index_of(patterns::Pattern::kVerticalSlash, 1.2f, 1),
            choice + "find move, note, sum, move, select, note, sum, count move, count, ");
  EXPECT_EQ(index_of(patterns::Pattern::kVerticalSlash, 1.0f, 1), choice + "count, ");
  EXPECT_EQ(index_of(patterns::Pattern::kVerticalSlash, 0.7f, 0), choice + "count, ");
  EXPECT_EQ(index_of(patterns::Pattern::kBlockTopK, 1.0f, 1),
            "index[, tile sums, gather, order, gate, work, gather, find move, gate, work, count "
            "move, ");
  EXPECT_EQ(index_of(patterns::Pattern::kBlockTopK, 1.0f, 0),
            "index[, tile sums, gather, order, gate, ");
}

// After the output, from whose sums it takes what was visited.
TEST(RingRunnerTest, AStepProbesWhenItIsDue) {
  LoggingDevice device(/*rank=*/0, /*ranks=*/2);
  LoggingCall call(&device);
  const ring::RingShape ring = {ring::RingKind::kFlat, 2, 1};
  const auto forward = [&](patterns::Pattern pattern, uint64_t step) {
    const auto runner = RingRunner::Create(
        {.pattern = pattern, .probe_every = 3, .window = 64, .tile = 64, .ring = ring}, &device);
    EXPECT_TRUE(runner.ok()) << runner.status();
    (*runner)->SetStep(step);
    EXPECT_TRUE((*runner)->Forward(call).ok());
    const std::string order = absl::StrJoin(std::exchange(device.log, {}), ", ");
    return order.substr(order.find("finish"));
  };
  constexpr char kProbe[] = "finish, ], index[, queries, sum, row max, max, row sum, sum, probe, ]";
  EXPECT_EQ(forward(patterns::Pattern::kSlidingWindow, 1), kProbe);
  EXPECT_EQ(forward(patterns::Pattern::kVerticalSlash, 6), kProbe);
  // Beside queries that are silent, others that are not.
  EXPECT_EQ(forward(patterns::Pattern::kBlockTopK, 3),
            "finish, ], index[, queries, sum, row max, max, row sum, sum, probe, queries, sum, row "
            "max, max, row sum, sum, probe heard, ]");
  EXPECT_EQ(forward(patterns::Pattern::kVerticalSlash, 2), "finish, ]");
  EXPECT_EQ(forward(patterns::Pattern::kVerticalSlash, 0), "finish, ]");  // an evaluation
  EXPECT_EQ(forward(patterns::Pattern::kDense, 1), "finish, ]");          // all there is
}

// Of 256 tokens one in four is probed, 32 of each rank; its tiles choose without them.
TEST(RingRunnerTest, ProbedQueriesAreSilentWhileOthersChoose) {
  const auto index_of = [](patterns::Selection selection, uint64_t step) {
    return IndexOf({.pattern = patterns::Pattern::kBlockTopK,
                    .selection = selection,
                    .probe_every = 3,
                    .tile = 64},
                   step);
  };
  const std::string choice = "tile sums, gather, order, gate, ";
  EXPECT_EQ(index_of(patterns::Selection::kFull, 3),
            "index[, silence 32 by 0, " + choice + "let speak, ");
  EXPECT_EQ(index_of(patterns::Selection::kFull, 2), "index[, " + choice);
  EXPECT_EQ(index_of(patterns::Selection::kCausal, 3), "index[, " + choice);
}

TEST(BuildIndexTest, AnUnknownPatternIsNamed) {
  LoggingDevice device(/*rank=*/0, /*ranks=*/1);
  LoggingCall call(&device);
  const absl::Status status =
      patterns::BuildIndex({.pattern = static_cast<patterns::Pattern>(17)}, {}, call).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(status.message()).find("pattern 17"), std::string::npos) << status;
}

}  // namespace
}  // namespace ringleader::attention
