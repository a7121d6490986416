#include "model_shape/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/numbers/ceil_div.h"
#include "model_shape/parameter_layout.h"
#include "model_shape/rope_frequencies.h"

namespace ringleader::model {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Json = nlohmann::json;

Json Qwen2() {
  return {{"model_type", "qwen2"},
          {"vocab_size", 61},
          {"hidden_size", 32},
          {"intermediate_size", 40},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2},
          {"tie_word_embeddings", true},
          {"max_position_embeddings", 64}};
}

absl::StatusOr<ModelConfig> Parse(const Json& json) {
  return ParseModelConfig(json.dump(), "config.json");
}

TEST(ModelConfigTest, ReadsShapeAndDefaults) {
  const auto config = Parse(Qwen2());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->family, Family::kQwen2);
  EXPECT_EQ(config->head_dim, 8);
  EXPECT_TRUE(config->qkv_bias);
  EXPECT_FALSE(config->attention_output_bias);
  EXPECT_TRUE(config->tied_embeddings);
  EXPECT_DOUBLE_EQ(config->rope.theta, 10000.0);

  Json llama = Qwen2();
  llama["model_type"] = "llama";
  llama.erase("num_key_value_heads");
  llama["head_dim"] = 16;
  llama["attention_bias"] = true;
  const auto other = Parse(llama);
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(other->kv_heads, 4);
  EXPECT_EQ(other->head_dim, 16);
  EXPECT_TRUE(other->attention_output_bias);
}

TEST(ModelConfigTest, CountsParametersAsTheLayoutDoes) {
  EXPECT_FALSE(ModelConfig().known());
  for (const char* type : {"qwen2", "llama"}) {
    for (const bool flag : {false, true}) {
      Json json = Qwen2();
      json["model_type"] = type;
      json["attention_bias"] = json["mlp_bias"] = json["tie_word_embeddings"] = flag;
      const auto config = Parse(json);
      ASSERT_TRUE(config.ok()) << config.status();
      EXPECT_TRUE(config->known());
      EXPECT_EQ(config->parameters(), MakeParameterLayout(*config).ParameterCount());
    }
  }
}

// Qwen2.5-3B.
TEST(ModelConfigTest, ReadsAConfigOfThreeBillion) {
  const auto shape = ParseModelConfig(R"({"model_type": "qwen2", "num_hidden_layers": 36,
      "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16,
      "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": true})",
                                      "config.json");
  ASSERT_TRUE(shape.ok()) << shape.status();
  EXPECT_EQ(shape->head_dim, 128);
  EXPECT_NEAR(shape->parameters(), 3.09e9, 0.01e9);
  Json json = Qwen2();
  json.erase("num_hidden_layers");
  EXPECT_THAT(std::string(Parse(json).status().message()),
              HasSubstr("\"num_hidden_layers\" is missing"));
  json["num_hidden_layers"] = -4;
  EXPECT_THAT(std::string(Parse(json).status().message()),
              AllOf(HasSubstr("num_hidden_layers"), HasSubstr("-4")));
  EXPECT_THAT(std::string(ParseModelConfig("[1", "config.json").status().message()),
              HasSubstr("not a JSON object"));
}

TEST(ModelConfigTest, ReadsBothSpellingsOfRopeScaling) {
  Json old = Qwen2();
  old["rope_theta"] = 5000.0;
  old["rope_scaling"] = {
      {"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 16}};
  Json fresh = Qwen2();
  fresh["rope_parameters"] = {{"rope_type", "yarn"},
                              {"factor", 4.0},
                              {"original_max_position_embeddings", 16},
                              {"rope_theta", 5000.0}};
  const auto a = Parse(old), b = Parse(fresh);
  ASSERT_TRUE(a.ok() && b.ok()) << a.status() << b.status();
  EXPECT_EQ(ComputeRopeFrequencies(*a, 64).inverse, ComputeRopeFrequencies(*b, 64).inverse);
  EXPECT_NEAR(a->rope.attention_factor, 1.1386294361, 1e-9);  // 0.1 ln 4 + 1
}

TEST(ModelConfigTest, RopeRulesThatDifferAreRefused) {
  Json both = Qwen2();
  both["rope_parameters"] = {{"rope_type", "linear"}, {"factor", 4.0}, {"rope_theta", 5000.0}};
  both["rope_scaling"] = {{"type", "linear"}, {"factor", 4.0}};
  EXPECT_TRUE(Parse(both).ok()) << Parse(both).status();
  both["rope_parameters"]["rope_type"] = "default";
  EXPECT_THAT(std::string(Parse(both).status().message()),
              AllOf(HasSubstr("rope_scaling"), HasSubstr("differs from \"rope_parameters\"")));

  // transformers 4 reads the one outside, and 5 the one inside.
  Json theta = Qwen2();
  theta["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 5000.0}};
  theta.erase("rope_theta");
  EXPECT_EQ(Parse(theta)->rope.theta, 5000.0);
  theta["rope_theta"] = 5000;
  EXPECT_TRUE(Parse(theta).ok()) << Parse(theta).status();
  theta["rope_theta"] = 1e6;
  EXPECT_THAT(std::string(Parse(theta).status().message()),
              AllOf(HasSubstr("rope_theta"), HasSubstr("differs from the one outside")));

  Json lengths = Qwen2();
  lengths["original_max_position_embeddings"] = 16;
  lengths["rope_scaling"] = {
      {"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 16}};
  EXPECT_TRUE(Parse(lengths).ok()) << Parse(lengths).status();
  lengths["original_max_position_embeddings"] = 32;
  EXPECT_THAT(std::string(Parse(lengths).status().message()),
              HasSubstr("\"original_max_position_embeddings\""));
}

// As models have it whose layers attend in windows and without: the rule of neither may be dropped.
TEST(ModelConfigTest, RopeByLayerTypeIsRefused) {
  for (const char* section : {"rope_parameters", "rope_scaling"}) {
    Json json = Qwen2();
    json[section] = {
        {"full_attention", {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 1e6}}}};
    EXPECT_EQ(Parse(json).status().message(),
              absl::StrCat("config.json: \"", section,
                           "\" is given by layer type (\"full_attention\"), which is not "
                           "supported; give one rule for all layers"));
    json[section]["rope_type"] = "default";
    EXPECT_THAT(std::string(Parse(json).status().message()), HasSubstr("is given by layer type"));
  }
}

TEST(ModelConfigTest, KeysOfRopeThatAreNotKnownAreRefused) {
  Json json = Qwen2();
  json["rope_scaling"] = {{"type", "dynamic"}, {"factor", 4.0}, {"alpha", 1000.0}};
  EXPECT_THAT(std::string(Parse(json).status().message()),
              AllOf(HasSubstr("config.json: \"rope_scaling\" has \"alpha\", which is not known"),
                    HasSubstr("remove it if it does not; known: attention_factor, ")));
  json["rope_scaling"]["alpha"] = nullptr;
  EXPECT_TRUE(Parse(json).ok()) << Parse(json).status();

  // What transformers writes of each rule, and what it may hold.
  const Json yarn = {{"rope_type", "yarn"},
                     {"factor", 4.0},
                     {"rope_theta", 5000.0},
                     {"truncate", false},
                     {"beta_fast", 32},
                     {"beta_slow", 1},
                     {"attention_factor", 1.25},
                     {"mscale", 1.0},
                     {"mscale_all_dim", 1.0},
                     {"finetuned", true},
                     {"type", "yarn"},
                     {"partial_rotary_factor", 1.0},
                     {"original_max_position_embeddings", 16}};
  const Json llama3 = {{"rope_type", "llama3"},   {"factor", 4.0},
                       {"rope_theta", 5000.0},    {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0}, {"original_max_position_embeddings", 16}};
  for (const Json& rule :
       {yarn, llama3, Json({{"rope_type", "default"}, {"rope_theta", 5000.0}}),
        Json({{"rope_type", "linear"}, {"factor", 2.0}, {"rope_theta", 5000.0}}),
        Json({{"rope_type", "dynamic"}, {"factor", 2.0}, {"rope_theta", 5000.0}})}) {
    json = Qwen2();
    json["rope_parameters"] = rule;
    const auto config = Parse(json);
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->rope.theta, 5000.0) << rule;
  }
}

struct BadConfig {
  std::string key;
  Json value;  // null: the key is taken out
  std::string message;
};

TEST(ModelConfigTest, ErrorsNameTheFileAndTheKey) {
  const std::vector<BadConfig> cases = {
      {"model_type", "mamba", "supported: qwen2, llama"},
      {"model_type", nullptr, "is missing"},
      {"vocab_size", nullptr, "is missing"},
      {"hidden_size", nullptr, "is missing"},
      {"intermediate_size", nullptr, "is missing"},
      {"num_hidden_layers", nullptr, "is missing"},
      {"num_attention_heads", nullptr, "is missing"},
      {"num_key_value_heads", nullptr, "is missing"},
      {"vocab_size", -1, "at least 1; it is -1"},
      {"vocab_size", 1.5, "it is 1.5"},
      {"vocab_size", "61", "it is \"61\""},
      {"hidden_size", 30, "multiple of \"num_attention_heads\""},
      {"hidden_size", 1099511627776, "at most 1048576 are supported"},
      {"num_attention_heads", 3, "multiple of \"num_key_value_heads\""},
      {"head_dim", 7, "even"},
      {"hidden_act", "gelu", "supported: silu"},
      {"use_sliding_window", true, "must be false"},
      {"tie_word_embeddings", 1, "true or false"},
      {"rms_norm_eps", 0, "above 0"},
      {"attention_dropout", 0.1, "must be 0"},
      {"quantization_config", {{"bits", 4}}, "not supported"},
      {"partial_rotary_factor", 0.5, "not supported"},
      {"rope_theta", "many", "above 0"},
      {"rope_scaling", 3, "must be an object"},
      {"vocab_size", int64_t{1} << 21, "is 2097152; at most 1048576 are supported"},
      {"rope_scaling", {{"rope_type", "longrope"}}, "supported: default, linear"},
      {"rope_scaling", {{"rope_type", "linear"}}, "\"factor\" is missing"},
      {"rope_scaling", {{"rope_type", "linear"}, {"factor", 0.5}}, "at least 1"},
      {"rope_scaling", {{"rope_type", "llama3"}, {"factor", 2}}, "\"low_freq_factor\" is missing"},
      {"rope_parameters",
       {{"rope_type", "yarn"},
        {"rope_theta", 1},
        {"factor", 4},
        {"original_max_position_embeddings", 16}},
       "above 1 for yarn"},
  };
  for (const BadConfig& bad : cases) {
    Json json = Qwen2();
    json[bad.key] = bad.value;
    if (bad.value.is_null()) json.erase(bad.key);
    const auto config = Parse(json);
    ASSERT_FALSE(config.ok()) << bad.key << " " << bad.value;
    EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(config.status().message()),
                AllOf(HasSubstr("config.json: "), HasSubstr(bad.key), HasSubstr(bad.message)));
  }
}

TEST(ModelConfigTest, WidthsTogetherHaveABoundToo) {
  Json json = Qwen2();
  json["num_attention_heads"] = json["num_key_value_heads"] = 1 << 20;
  json["head_dim"] = 2;
  EXPECT_THAT(std::string(Parse(json).status().message()),
              AllOf(HasSubstr("num_attention_heads"), HasSubstr("at most 1048576 are supported")));
  json = Qwen2();
  json["hidden_size"] = json["intermediate_size"] = 1 << 20;
  json["num_hidden_layers"] = 10'000;
  json["num_attention_heads"] = json["num_key_value_heads"] = 1 << 13;
  EXPECT_THAT(std::string(Parse(json).status().message()),
              AllOf(HasSubstr("hidden_size"), HasSubstr("at most 1e13")));
}

TEST(ModelConfigTest, GarbageIsAnErrorNeverACrash) {
  EXPECT_FALSE(ParseModelConfig("", "f").ok());
  EXPECT_FALSE(ParseModelConfig("[1]", "f").ok());
  EXPECT_FALSE(LoadModelConfig("/nowhere/config.json").ok());
  EXPECT_FALSE(ParseModelConfig(std::string(100000, '['), "f").ok());
  // What is well formed but for its depth, in a value that is printed and in one that is kept.
  for (const char* key : {"vocab_size", "unknown"}) {
    std::string deep = Qwen2().dump();
    deep.insert(1, "\"" + std::string(key) + "\": " + std::string(400'000, '[') +
                       std::string(400'000, ']') + ", ");
    EXPECT_THAT(std::string(ParseModelConfig(deep, "f").status().message()),
                HasSubstr("nested more than 32 deep"));
  }
  const std::string valid = Qwen2().dump();
  std::mt19937 random(1);
  for (int i = 0; i < 5000; ++i) {
    std::string text = valid;
    for (int edits = 1 + random() % 4; edits > 0; --edits) {
      text[random() % text.size()] = static_cast<char>(random());
    }
    const auto config = ParseModelConfig(text, "f");
    if (config.ok()) {
      EXPECT_GT(config->head_dim, 0);
    } else {
      EXPECT_THAT(std::string(config.status().message()), HasSubstr("f: "));
    }
  }
}

TEST(ParameterLayoutTest, ShardsCoverTheBufferAndGroupsTouch) {
  const auto config = Parse(Qwen2());
  const ParameterLayout layout = MakeParameterLayout(*config);
  int64_t end = 0;
  for (const ParameterSlot& slot : layout.slots) {
    EXPECT_GE(slot.offset, end);
    end = slot.offset + slot.elements;
  }
  EXPECT_LE(end, layout.elements);
  // 61 * 32 embeddings, 2 layers of (32 + 64 * 32 + 64 + 32 * 32 + 32 + 3 * 32 * 40), a norm of 32.
  EXPECT_EQ(layout.ParameterCount(), 61 * 32 + 2 * (32 + 64 * 32 + 64 + 1024 + 32 + 3840) + 32);
  const ParameterSlot* q = layout.Find("model.layers.1.self_attn.q_proj.weight");
  const ParameterSlot* k = layout.Find("model.layers.1.self_attn.k_proj.weight");
  ASSERT_TRUE(q != nullptr && k != nullptr);
  EXPECT_EQ(q->offset % ParameterLayout::kAlignment, 0);
  EXPECT_EQ(k->offset, q->offset + q->elements);
  for (const int ranks : {1, 2, 3, 7, 64}) {
    EXPECT_GE(layout.PaddedElements(ranks), layout.elements);
    EXPECT_EQ(layout.ShardElements(ranks) % ParameterLayout::kAlignment, 0);
  }
}

// Biases are groups of their own, whatever the elements of the matrices before them.
TEST(ParameterLayoutTest, EveryGroupStartsAligned) {
  ModelConfig config;
  config.vocab_size = 7;
  config.hidden_size = 6;
  config.intermediate_size = 5;
  config.layers = 2;
  config.heads = 3;
  config.kv_heads = 1;
  config.head_dim = 2;
  config.qkv_bias = config.attention_output_bias = config.mlp_bias = true;
  const ParameterLayout layout = MakeParameterLayout(config);
  ASSERT_EQ(layout.slots.size(), 1u + 2 * 16 + 2);
  int64_t end = 0;
  for (const ParameterSlot& slot : layout.slots) {
    const bool goes_on = absl::StrContains(slot.name, "k_proj") ||
                         absl::StrContains(slot.name, "v_proj") ||
                         absl::StrContains(slot.name, "up_proj");
    constexpr int64_t kAlign = ParameterLayout::kAlignment;
    EXPECT_EQ(slot.offset, goes_on ? end : RoundUp(end, kAlign)) << slot.name;
    end = slot.offset + slot.elements;
  }
}

TEST(ParameterLayoutTest, InitialisationIsHuggingFacesAndDependsOnTheSeed) {
  const auto config = Parse(Qwen2());
  const ParameterLayout layout = MakeParameterLayout(*config);
  const auto draw = [&](uint64_t seed) {
    std::vector<float> values(layout.elements);
    InitializeParameters(*config, layout, seed, 0, layout.elements, values.data());
    return values;
  };
  const std::vector<float> values = draw(1);
  EXPECT_EQ(values, draw(1));
  EXPECT_NE(values, draw(2));
  std::vector<float> in_ranges(layout.elements);
  for (int64_t first = 0; first < layout.elements; first += 1000) {
    InitializeParameters(*config, layout, 1, first,
                         std::min<int64_t>(1000, layout.elements - first),
                         in_ranges.data() + first);
  }
  EXPECT_EQ(values, in_ranges);
  const ParameterSlot& embedding = layout.slots[0];
  double squares = 0.0;
  for (int64_t i = 0; i < embedding.elements; ++i) squares += values[i] * values[i];
  EXPECT_NEAR(std::sqrt(squares / embedding.elements), 0.02, 0.001);
  // The share within one deviation is a normal distribution's.
  const auto within = std::count_if(values.begin(), values.begin() + embedding.elements,
                                    [](float value) { return std::abs(value) < 0.02f; });
  EXPECT_NEAR(static_cast<double>(within) / embedding.elements, 0.683, 0.02);
  EXPECT_EQ(values[layout.Find("model.norm.weight")->offset], 1.0f);
  EXPECT_EQ(values[layout.Find("model.layers.0.self_attn.v_proj.bias")->offset], 0.0f);
  // Another name, another draw.
  EXPECT_NE(values[layout.Find("model.layers.0.self_attn.o_proj.weight")->offset],
            values[layout.Find("model.layers.1.self_attn.o_proj.weight")->offset]);
}

}  // namespace
}  // namespace ringleader::model
