#include "model_shape/precision.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace ringleader::model {
namespace {

using testing::HasSubstr;

TEST(PrecisionTest, WidthsThatProductsDoNotTakeAreRefusedByName) {
  ModelConfig fits;
  fits.hidden_size = 64;
  fits.intermediate_size = 176;
  fits.layers = 3;
  fits.heads = 4;
  fits.kv_heads = 2;
  fits.head_dim = 16;
  EXPECT_TRUE(CheckPrecision(fits, Precision::kFp8).ok());
  EXPECT_TRUE(CheckPrecision({}, Precision::kFp8).ok()) << "nothing is known";
  const auto refusal = [&](auto change) {
    ModelConfig config = fits;
    change(config);
    EXPECT_TRUE(CheckPrecision(config, Precision::kModelType).ok());
    const absl::Status status = CheckPrecision(config, Precision::kFp8);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refusal([](ModelConfig& c) { c.hidden_size = 72; }), HasSubstr("hidden_size is 72"));
  EXPECT_THAT(refusal([](ModelConfig& c) { c.intermediate_size = 180; }),
              HasSubstr("intermediate_size is 180"));
  EXPECT_THAT(refusal([](ModelConfig& c) { c.intermediate_size = 49152; }),
              HasSubstr("at most 32768, and the model's intermediate_size is 49152"));
  EXPECT_THAT(refusal([](ModelConfig& c) { c.heads = 5, c.kv_heads = 5, c.head_dim = 8; }),
              HasSubstr("num_attention_heads * head_dim is 40"));
  EXPECT_THAT(refusal([](ModelConfig& c) { c.kv_heads = 1, c.head_dim = 12; }),
              HasSubstr("num_key_value_heads) * head_dim is 72"));
}

// The first layer and the last are left out, so that a model of two has none.
TEST(PrecisionTest, SaysWhichLayersAreCast) {
  const auto cast = [](int64_t layers, Precision precision) {
    const CastLayers of = CastLayersOf(layers, precision);
    std::string text;
    for (int64_t layer = 0; layer < layers; ++layer) text += of.contains(layer) ? 'x' : '.';
    EXPECT_EQ(of.count(), std::ranges::count(text, 'x'));
    return text;
  };
  EXPECT_EQ(cast(4, Precision::kModelType), "....");
  EXPECT_EQ(cast(4, Precision::kFp8), ".xx.");
  EXPECT_EQ(cast(4, Precision::kFp8AllLayers), "xxxx");
  EXPECT_EQ(cast(3, Precision::kFp8), ".x.");
  EXPECT_EQ(cast(2, Precision::kFp8), "..");
  EXPECT_EQ(cast(1, Precision::kFp8), ".");

  ModelConfig two;
  two.layers = 2;
  EXPECT_THAT(std::string(CheckPrecision(two, Precision::kFp8).message()),
              HasSubstr("num_hidden_layers is 2; set training.precision: fp8_all_layers"));
  EXPECT_TRUE(CheckPrecision(two, Precision::kFp8AllLayers).ok());
  EXPECT_TRUE(CheckPrecision(two, Precision::kModelType).ok());
}

}  // namespace
}  // namespace ringleader::model
