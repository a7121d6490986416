#include "model_shape/precision.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ringleader::model {
namespace {

using testing::HasSubstr;

TEST(PrecisionTest, WidthsThatProductsDoNotTakeAreRefusedByName) {
  ModelConfig fits;
  fits.hidden_size = 64;
  fits.intermediate_size = 176;
  fits.layers = 2;
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

}  // namespace
}  // namespace ringleader::model
