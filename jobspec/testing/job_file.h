// The example that tests of the job file change, and how.
#pragma once

#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "jobspec/jobspec.h"

namespace ringleader::jobspec::testing {

inline constexpr char kJob[] = R"(
name: headers-16k
model: {config: ./config.json, init: random}
data: {train: ./tokens/train, eval: ./tokens/eval, sequence_length: 16384}
attention: {pattern: vertical_slash, select: top_p, vertical_mass: 0.9, slash_mass: 0.9, dense_layers: [0]}
parallelism: {context: 4, data: 1, layout: auto, ring: auto}
training: {steps: 40, global_batch: 1, learning_rate: 3e-4, warmup_steps: 4, seed: 1}
checkpoint: {directory: ./checkpoints, every_steps: 10, keep_last: 2}
resources: {trainers: 4}
)";

inline absl::StatusOr<v1::JobSpec> Parse(std::string_view yaml,
                                         std::vector<std::string> overrides = {}) {
  return ParseJobFile(yaml, {.overrides = std::move(overrides), .base_directory = "/job"});
}

inline v1::JobSpec Job(std::vector<std::string> overrides = {}) {
  auto spec = Parse(kJob, std::move(overrides));
  EXPECT_TRUE(spec.ok()) << spec.status();
  return spec.ok() ? *spec : v1::JobSpec();
}

// What a user sees when the example is changed by `overrides`.
inline std::string Complaint(std::vector<std::string> overrides) {
  return std::string(Validate(Job(std::move(overrides))).message());
}

inline std::string ParseError(std::string_view yaml, std::vector<std::string> overrides = {}) {
  return std::string(Parse(yaml, std::move(overrides)).status().message());
}

inline bool Same(const v1::JobSpec& a, const v1::JobSpec& b) {
  return google::protobuf::util::MessageDifferencer::Equals(a, b);
}

}  // namespace ringleader::jobspec::testing
