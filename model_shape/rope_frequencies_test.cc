// Frequencies of rotary embeddings under each scaling rule, against the rules as their papers and
// transformers state them.
#include "model_shape/rope_frequencies.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>
#include <vector>

namespace ringleader::model {
namespace {

using Json = nlohmann::json;

// Heads of 8 values: frequencies of 10000 ^ (-i / 4), i = 0..3.
ModelConfig ConfigWith(const Json& scaling, int64_t max_positions = 64) {
  Json json = {{"model_type", "qwen2"},    {"vocab_size", 61},
               {"hidden_size", 32},        {"intermediate_size", 40},
               {"num_hidden_layers", 2},   {"num_attention_heads", 4},
               {"num_key_value_heads", 2}, {"max_position_embeddings", max_positions}};
  if (!scaling.is_null()) json["rope_parameters"] = scaling;
  const auto config = ParseModelConfig(json.dump(), "config.json");
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? *config : ModelConfig();
}

std::vector<double> Plain(double theta = 10000.0) {
  std::vector<double> inverse;
  for (int i = 0; i < 4; ++i) inverse.push_back(std::pow(theta, -i / 4.0));
  return inverse;
}

void ExpectFrequencies(const ModelConfig& config, int64_t tokens,
                       const std::vector<double>& expected) {
  const RopeFrequencies actual = ComputeRopeFrequencies(config, tokens);
  ASSERT_EQ(actual.inverse.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(actual.inverse[i] / expected[i], 1.0, 1e-6) << i;
  }
}

double AttentionFactor(const Json& scaling) {
  return ComputeRopeFrequencies(ConfigWith(scaling), 64).attention_factor;
}

TEST(RopeFrequenciesTest, WithoutScaling) {
  ExpectFrequencies(ConfigWith(nullptr), 1'000'000, Plain());
  ExpectFrequencies(ConfigWith({{"rope_type", "default"}, {"rope_theta", 500.0}}), 64, Plain(500));
  EXPECT_EQ(AttentionFactor(nullptr), 1.0);
}

TEST(RopeFrequenciesTest, LinearStretchesAllAtAnyLength) {
  std::vector<double> expected = Plain();
  for (double& frequency : expected) frequency /= 2;
  for (const int64_t tokens : {1, 64, 10'000}) {
    ExpectFrequencies(ConfigWith({{"rope_type", "linear"}, {"factor", 2.0}}), tokens, expected);
  }
}

// theta (factor length / trained - (factor - 1)) ^ (d / (d - 2)), beyond the trained length.
TEST(RopeFrequenciesTest, DynamicGrowsWithTheSequenceItself) {
  const ModelConfig config = ConfigWith({{"rope_type", "dynamic"}, {"factor", 3.0}});
  ExpectFrequencies(config, 1, Plain());
  ExpectFrequencies(config, 64, Plain());
  for (const int64_t tokens : {65, 128, 640}) {
    const double stretch = 3.0 * static_cast<double>(tokens) / 64 - 2.0;
    ExpectFrequencies(config, tokens, Plain(10000.0 * std::pow(stretch, 8.0 / 6.0)));
  }
  // The length that the model has decides, not one before.
  ExpectFrequencies(
      ConfigWith(
          {{"rope_type", "dynamic"}, {"factor", 3.0}, {"original_max_position_embeddings", 16}}),
      64, Plain());
}

// Fast frequencies stay, slow ones are divided by the factor, linearly between: by how often each
// turns over the trained length.
TEST(RopeFrequenciesTest, YarnRampsBetweenFastAndSlow) {
  const auto index_of = [](double turns) {
    return 8 * std::log(16 / (turns * 2 * std::numbers::pi)) / (2 * std::log(10000.0));
  };
  Json scaling = {
      {"rope_type", "yarn"}, {"factor", 4.0},     {"original_max_position_embeddings", 16},
      {"beta_fast", 2.0},    {"beta_slow", 0.01}, {"truncate", false}};
  for (const bool truncate : {false, true}) {
    scaling["truncate"] = truncate;
    double low = index_of(2.0), high = index_of(0.01);
    ASSERT_GT(low, 0.0);
    ASSERT_LT(high, 3.0);
    if (truncate) {
      low = std::floor(low);
      high = std::ceil(high);
    }
    std::vector<double> expected = Plain();
    for (int i = 0; i < 4; ++i) {
      const double slow = std::min(1.0, std::max(0.0, (i - low) / (high - low)));
      expected[i] *= (1 - slow) + slow / 4;
    }
    ExpectFrequencies(ConfigWith(scaling), 64, expected);
    ExpectFrequencies(ConfigWith(scaling), 6400, expected);
  }
}

// The ramp begins with the first frequency where even that turns too seldom to be a fast one.
TEST(RopeFrequenciesTest, YarnsRampBeginsNoEarlierThanTheFirstFrequency) {
  const double high = 8 * std::log(16 / (0.01 * 2 * std::numbers::pi)) / (2 * std::log(10000.0));
  std::vector<double> expected = Plain();
  for (int i = 0; i < 4; ++i) {
    const double slow = std::min(1.0, i / high);
    expected[i] *= (1 - slow) + slow / 4;
  }
  const Json scaling = {
      {"rope_type", "yarn"}, {"factor", 4.0},     {"original_max_position_embeddings", 16},
      {"beta_fast", 10.0},   {"beta_slow", 0.01}, {"truncate", false}};
  ExpectFrequencies(ConfigWith(scaling), 64, expected);
}

TEST(RopeFrequenciesTest, YarnsMagnitude) {
  Json scaling = {{"rope_type", "yarn"}, {"factor", 40.0}};
  const double log = std::log(40.0);
  EXPECT_NEAR(AttentionFactor(scaling), 0.1 * log + 1, 1e-12);
  scaling["mscale"] = 1.0;
  EXPECT_NEAR(AttentionFactor(scaling), 0.1 * log + 1, 1e-12) << "takes both, or neither";
  EXPECT_NEAR(AttentionFactor({{"rope_type", "yarn"}, {"factor", 40.0}, {"mscale_all_dim", 0.5}}),
              0.1 * log + 1, 1e-12);
  scaling["mscale_all_dim"] = 0.5;
  EXPECT_NEAR(AttentionFactor(scaling), (0.1 * log + 1) / (0.05 * log + 1), 1e-12);
  scaling["mscale_all_dim"] = 1.0;
  EXPECT_EQ(AttentionFactor(scaling), 1.0);
  scaling["mscale"] = 0.5;
  EXPECT_NEAR(AttentionFactor(scaling), (0.05 * log + 1) / (0.1 * log + 1), 1e-12);
  scaling["attention_factor"] = 1.75;
  EXPECT_EQ(AttentionFactor(scaling), 1.75);
  EXPECT_EQ(AttentionFactor({{"rope_type", "yarn"}, {"factor", 1.0}}), 1.0);
}

// Wavelengths of less than trained / high stay, of more than trained / low are stretched.
TEST(RopeFrequenciesTest, Llama3StretchesLongWavelengths) {
  const Json scaling = {{"rope_type", "llama3"},
                        {"factor", 4.0},
                        {"low_freq_factor", 1.0},
                        {"high_freq_factor", 3.0},
                        {"original_max_position_embeddings", 100}};
  std::vector<double> expected = Plain();
  for (double& frequency : expected) {
    const double wavelength = 2 * std::numbers::pi / frequency;
    if (wavelength < 100 / 3.0) continue;
    if (wavelength > 100 / 1.0) {
      frequency /= 4;
      continue;
    }
    const double smooth = (100 / wavelength - 1.0) / (3.0 - 1.0);
    frequency = (1 - smooth) * frequency / 4 + smooth * frequency;
  }
  EXPECT_GT(expected[1] / Plain()[1], 0.25) << "one lies between";
  EXPECT_LT(expected[1] / Plain()[1], 1.0);
  ExpectFrequencies(ConfigWith(scaling), 64, expected);
}

TEST(RopeFrequenciesTest, TheTrainedLengthMayStandBesideTheRule) {
  Json json = {{"rope_type", "yarn"}, {"factor", 4.0}, {"beta_slow", 0.05}};
  const ModelConfig own = ConfigWith(json);
  EXPECT_EQ(own.rope.original_max_positions, 64);
  EXPECT_EQ(own.rope.beta_fast, 32.0);
  EXPECT_EQ(own.rope.beta_slow, 0.05);
  EXPECT_TRUE(own.rope.truncate);
  json["original_max_position_embeddings"] = 16;
  EXPECT_EQ(ConfigWith(json).rope.original_max_positions, 16);
}

}  // namespace
}  // namespace ringleader::model
