#include "coordinator/session/parse_cost.h"

#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "ringleader/v1/worker_control.pb.h"

namespace ringleader::session {
namespace {

constexpr size_t kAny = std::numeric_limits<size_t>::max();

absl::StatusOr<ParseCost> Cost(const std::string& wire, size_t max_bytes = kAny) {
  google::protobuf::io::ArrayInputStream stream(wire.data(), static_cast<int>(wire.size()), 7);
  return CostToParse(*v1::WorkerMessage::descriptor(), max_bytes, &stream);
}
std::string Repeated(const std::string& text, size_t times) {
  std::string all;
  for (size_t i = 0; i < times; ++i) all += text;
  return all;
}
// `body` as the field with this number (below 16).
std::string Field(int number, const std::string& body) {
  std::string wire(1, static_cast<char>(number << 3 | 2));
  for (size_t rest = body.size(); true; rest >>= 7) {
    wire.push_back(static_cast<char>((rest & 0x7f) | (rest > 0x7f ? 0x80 : 0)));
    if (rest <= 0x7f) break;
  }
  return wire + body;
}

// The bound holds whatever a message is made of, and messages of workers are far below what one may
// take.
TEST(CostToParseTest, IsNoLessThanWhatTheMessageTakes) {
  v1::WorkerMessage logs;
  for (int i = 0; i < 1000; ++i) {
    v1::LogLine* const line = logs.mutable_event()->mutable_logs()->add_lines();
    line->set_rank(3);
    line->mutable_time()->set_seconds(1'700'000'000);
    line->set_text(std::string(static_cast<size_t>(i % 100), 'x'));
  }
  v1::WorkerMessage step;
  for (int i = 0; i < 100; ++i) {
    v1::LayerReport* const layer = step.mutable_event()->mutable_step()->add_layers();
    layer->set_density(0.5);
    for (int hop = 0; hop < 64; ++hop) layer->add_tiles_per_ring_step(1);
  }
  v1::WorkerMessage hello;
  hello.mutable_hello()->set_node(std::string(10'000, 'n'));
  for (uint32_t i = 0; i < 1000; ++i) hello.mutable_hello()->add_attempts()->add_ranks(i);
  for (int i = 0; i < 10'000; ++i) hello.mutable_hello()->mutable_attempts(0)->add_ranks(1);
  for (const v1::WorkerMessage& message : {logs, step, hello, v1::WorkerMessage()}) {
    v1::WorkerMessage parsed;
    ASSERT_TRUE(parsed.ParseFromString(message.SerializeAsString()));
    const absl::StatusOr<ParseCost> cost = Cost(message.SerializeAsString());
    ASSERT_TRUE(cost.ok()) << cost.status();
    EXPECT_FALSE(cost->has_unknown);
    EXPECT_GE(cost->bytes + sizeof(v1::WorkerMessage), parsed.SpaceUsedLong());
    EXPECT_LE(cost->bytes, 4 * parsed.SpaceUsedLong());
  }
}

TEST(CostToParseTest, FindsWhatIsSmallOnTheWireOnly) {
  constexpr size_t kTimes = 10'000;
  const std::string hostile[] = {
      Field(5, Field(9, Repeated(Field(1, ""), kTimes))),  // empty lines of a log
      Repeated(Field(15, ""), kTimes),                     // unknown fields
      Repeated("\x78\x01", kTimes),                        // unknown numbers
      Repeated("\x7b\x7c", kTimes),                        // unknown groups
      Field(2, Field(5, Field(4, std::string(kTimes, '\x01'))))};
  for (const std::string& wire : hostile) {
    v1::WorkerMessage parsed;
    ASSERT_TRUE(parsed.ParseFromString(wire));
    const absl::StatusOr<ParseCost> cost = Cost(wire);
    ASSERT_TRUE(cost.ok()) << cost.status();
    EXPECT_GE(cost->bytes + sizeof(v1::WorkerMessage), parsed.SpaceUsedLong());
    const absl::StatusOr<ParseCost> cut = Cost(wire, 1000);
    ASSERT_TRUE(cut.ok()) << cut.status();
    EXPECT_GT(cut->bytes, 1000u);
    EXPECT_LE(cut->bytes, cost->bytes);
  }
  EXPECT_LT(Cost(hostile[0], 1000)->bytes, 2000u);  // stops there
  EXPECT_TRUE(Cost(hostile[1])->has_unknown);
  EXPECT_TRUE(Cost(hostile[3])->has_unknown);
}

TEST(CostToParseTest, RefusesWhatTheParserWould) {
  const std::string nested = std::string(200, '\x7b') + std::string(200, '\x7c');
  for (const std::string& wire :
       {std::string("\x28"), std::string("\x2a\x05"), std::string("\x2a\xff\xff\xff\xff\xff"),
        std::string("\x7b"), std::string("\x7c"), std::string("\x7e"), nested,
        Field(5, "\x4a\x02\x0a")}) {
    EXPECT_FALSE(v1::WorkerMessage().ParseFromString(wire));
    EXPECT_EQ(Cost(wire).status().code(), absl::StatusCode::kInvalidArgument) << wire;
  }
}

}  // namespace
}  // namespace ringleader::session
