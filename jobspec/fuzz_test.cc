// Bounded fuzz of the parser: mutated job files and plain garbage give a Status, never a crash, and
// whatever passes validation survives a round trip.

#include <gmock/gmock.h>
#include <google/protobuf/stubs/logging.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "jobspec/fields/fields.h"
#include "jobspec/jobspec.h"

namespace ringleader::jobspec {
namespace {

constexpr int kInputs = 10000;

constexpr char kSeed[] = R"(name: headers-16k
labels: {team: ocean}
model: {config: /config.json, init: random}
data:
  train: /tokens/train
  sequence_length: 16384
attention: {pattern: vertical_slash, select: top_p, vertical_mass: 0.9, dense_layers: [0, 3]}
parallelism: {context: 4, layout: auto, ring: flat}
training: {steps: 40, learning_rate: 3e-4, warmup_steps: 4, seed: 1}
checkpoint: {directory: /checkpoints, every_steps: 10}
resources: {trainers: 4}
)";

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  std::string Mutate() {
    std::string text = Below(10) == 0 ? Garbage() : kSeed;
    for (int edits = 1 + Below(6); edits > 0; --edits) Edit(&text);
    return text;
  }

 private:
  int Below(int n) { return std::uniform_int_distribution<int>(0, n - 1)(random_); }
  size_t Position(const std::string& text) { return Below(static_cast<int>(text.size()) + 1); }

  std::string Garbage() {
    std::string text(Below(400), '\0');
    for (char& c : text) c = static_cast<char>(Below(256));
    return text;
  }

  void Edit(std::string* text) {
    static constexpr const char* kTokens[] = {"&a ",
                                              "*a",
                                              "!!binary ",
                                              "? ",
                                              "- ",
                                              "<<: *a",
                                              "[",
                                              "]",
                                              "{",
                                              "}",
                                              "\n",
                                              "\t",
                                              ": ",
                                              "|\n",
                                              ">-\n",
                                              "%YAML 9.9\n",
                                              "---\n",
                                              "...\n",
                                              "\"",
                                              "'",
                                              "#",
                                              "~",
                                              "1e999",
                                              "-0",
                                              "\0x",
                                              "!<",
                                              "18446744073709551616",
                                              "0x10",
                                              "\xef\xbb\xbf",
                                              "\xff\xfe",
                                              "\xe2\x80\xa8",
                                              "@",
                                              "`"};
    const size_t at = Position(*text);
    switch (Below(6)) {
      case 0:
        if (at < text->size()) (*text)[at] = static_cast<char>(Below(256));
        break;
      case 1:
        text->insert(at, kTokens[Below(std::size(kTokens))]);
        break;
      case 2:
        text->erase(at, Below(40));
        break;
      case 3:
        text->insert(at, text->substr(Position(*text), Below(60)));
        break;
      case 4: {
        const std::string name(Fields()[Below(static_cast<int>(Fields().size()))].path);
        text->insert(at, name + ": " + std::to_string(Below(1000) - 500));
        break;
      }
      default:
        text->insert(at, std::string(Below(200), "[{-?: "[Below(6)]));
    }
  }

  std::mt19937_64 random_;
};

// A spec that passes says the same when it was written down and read back.
void ExpectTheSameFromItsFile(const v1::JobSpec& spec) {
  const auto back = ParseJobFile(ToYaml(spec), {});
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(spec, *back));
}

// What is wrong is the caller's, and is told in one line, or in as many as it says.
void ExpectAComplaint(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  const std::string message(status.message());
  EXPECT_FALSE(message.empty());
  const auto lines = std::count(message.begin(), message.end(), '\n');
  if (lines == 0) return;
  EXPECT_THAT(message, ::testing::StartsWith(std::to_string(lines) + " mistakes")) << status;
  EXPECT_LE(lines, 20) << status;
}

TEST(FuzzTest, MutatedJobFilesNeverCrash) {
  Mutator mutator(20260101);
  int valid = 0;
  for (int i = 0; i < kInputs; ++i) {
    const std::string text = mutator.Mutate();
    SCOPED_TRACE(text);
    const auto spec = ParseJobFile(text, {.base_directory = "/job"});
    if (!spec.ok()) {
      ExpectAComplaint(spec.status());
      continue;
    }
    if (!Validate(*spec).ok()) continue;
    ++valid;
    ExpectTheSameFromItsFile(*spec);
  }
  // The mutations must reach past the parser for the test to mean anything.
  EXPECT_GT(valid, 100);
}

TEST(FuzzTest, MutatedOverridesAreTakenOrRefused) {
  std::mt19937 random(7);
  int valid = 0, refused = 0;
  for (int i = 0; i < kInputs; ++i) {
    const auto fields = Fields();
    std::string text = std::string(fields[random() % fields.size()].path) + "=";
    for (int n = random() % 12; n > 0; --n) text += static_cast<char>(random() % 256);
    if (random() % 4 == 0) text[random() % text.size()] = static_cast<char>(random());
    if (random() % 4 == 0) text.resize(text.find('=') + 1), text += std::to_string(random() % 100);
    SCOPED_TRACE(text);
    auto spec = ParseJobFile(kSeed, {.overrides = {text}});
    if (!spec.ok()) {
      ExpectAComplaint(spec.status());
      ++refused;
    } else if (Validate(*spec).ok()) {
      ++valid;
      // "scheduling.priority=" leaves an empty section, which no file needs.
      if (spec->scheduling().ByteSizeLong() == 0) spec->clear_scheduling();
      ExpectTheSameFromItsFile(*spec);
    }
  }
  EXPECT_GT(valid, 100);
  EXPECT_GT(refused, 100);
}

TEST(FuzzTest, MutatedMessagesPassAndSayTheSameOrAreRefused) {
  std::mt19937 random(11);
  const auto seed = ParseJobFile(kSeed, {});
  ASSERT_TRUE(seed.ok());
  const std::string bytes = seed->SerializeAsString();
  const google::protobuf::LogSilencer quiet;  // of strings that are no UTF-8
  int valid = 0, refused = 0;
  for (int i = 0; i < kInputs; ++i) {
    std::string mutated = bytes;
    for (int n = 1 + random() % 4; n > 0; --n) {
      mutated[random() % mutated.size()] = static_cast<char>(random());
    }
    v1::JobSpec spec;
    if (!spec.ParseFromString(mutated)) continue;
    const absl::Status status = Validate(spec);
    ApplyDefaults(&spec);
    if (!status.ok()) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      ToYaml(spec);
      ++refused;
      continue;
    }
    ++valid;
    spec.DiscardUnknownFields();
    ExpectTheSameFromItsFile(spec);
  }
  EXPECT_GT(valid, 100);
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace ringleader::jobspec
