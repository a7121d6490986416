// Parity with Hugging Face: the models under tests/golden and what transformers computed for them.
#include "worker/model/testing/golden.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/temp_dir.h"
#include "worker/model/decoder/decoder.h"
#include "worker/model/decoder/dense_attention.h"
#include "worker/model/files/huggingface.h"
#include "worker/model/files/safetensors.h"

namespace ringleader::model {
namespace {

struct Case {
  std::string name;
  Recompute recompute;
};

class GoldenTest : public testing::TestWithParam<Case> {
 protected:
  // Models this small only lose from more threads.
  void SetUp() override { at::set_num_threads(1); }

  std::string Folder() const { return "tests/golden/" + GetParam().name; }
};

TEST_P(GoldenTest, LogitsLossAndGradientsEqualTransformers) {
  const absl::StatusOr<ModelConfig> config = LoadModelConfig(Folder() + "/config.json");
  ASSERT_TRUE(config.ok()) << config.status();
  Decoder decoder(*config, /*ranks=*/3, GetParam().recompute);
  const absl::Status loaded =
      LoadWeights(Folder(), *config, decoder.layout(), decoder.parameters());
  ASSERT_TRUE(loaded.ok()) << loaded;
  const auto expected = ReadAllTensors(Folder() + "/expected.safetensors");
  const torch::Tensor tokens = expected.at("tokens").to(torch::kInt64);
  const int64_t n = tokens.size(0);

  DenseAttention attention;
  const torch::Tensor hidden = decoder.Forward(tokens, torch::arange(n), n, attention);
  const torch::Tensor difference =
      (decoder.Logits(hidden).detach() - expected.at("logits")).abs().max();
  EXPECT_LE(difference.item<double>(), 1e-4);

  const TokenLoss loss = decoder.Loss(hidden, expected.at("labels").to(torch::kInt64));
  EXPECT_EQ(loss.tokens, n - 4);
  EXPECT_NEAR(loss.sum.item<double>(), expected.at("loss").item<double>(), 2e-3);

  // Twice, half each: gradients must add up in place in the flat buffer.
  (loss.sum * 0.5).backward({}, /*retain_graph=*/true);
  (loss.sum * 0.5).backward();
  for (const ParameterSlot& slot : decoder.layout().slots) {
    const torch::Tensor gradient = torch::from_blob(decoder.gradients() + slot.offset, slot.shape);
    EXPECT_LE(RelativeError(gradient, expected.at("grad." + slot.name)), 1e-3) << slot.name;
  }
}

TEST_P(GoldenTest, ExportHasTheNamesShapesAndTypesOfTheOriginal) {
  const absl::StatusOr<ModelConfig> config = LoadModelConfig(Folder() + "/config.json");
  ASSERT_TRUE(config.ok()) << config.status();
  const ParameterLayout layout = MakeParameterLayout(*config);
  std::vector<float> values(layout.elements);
  ASSERT_TRUE(LoadWeights(Folder(), *config, layout, values.data()).ok());
  // tests/golden/check_export.py sets the folder, and loads from it what this leaves there.
  const char* kept = std::getenv("RINGLEADER_EXPORT_DIR");
  const TempDir temporary;
  const std::string folder =
      (kept != nullptr ? std::string(kept) : temporary.path().string()) + "/" + GetParam().name;
  const absl::Status status = ExportModel(folder, *config, layout, values.data());
  ASSERT_TRUE(status.ok()) << status;

  const auto ours = SafetensorsFile::Open(folder + "/model.safetensors");
  const auto theirs = SafetensorsFile::Open(Folder() + "/model.safetensors");
  ASSERT_TRUE(ours.ok()) << ours.status();
  ASSERT_TRUE(theirs.ok()) << theirs.status();
  const auto contents = [](const SafetensorsFile& file) {
    std::map<std::string, std::tuple<StoredType, std::vector<int64_t>, std::string>> map;
    for (const StoredTensor& tensor : file.header().tensors) {
      const auto bytes = file.Bytes(tensor);
      map[tensor.name] = {tensor.type, tensor.shape,
                          std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size())};
    }
    return map;
  };
  EXPECT_TRUE(contents(**ours) == contents(**theirs));
  EXPECT_EQ((*ours)->header().metadata.at("format"), "pt");

  // The config says the same, under the key that all versions of transformers read.
  const auto read = [](const std::string& path) {
    std::ifstream file(path);
    return nlohmann::json::parse(file);
  };
  nlohmann::json original = read(Folder() + "/config.json");
  original["torch_dtype"] = original["dtype"];
  original.erase("dtype");
  EXPECT_EQ(read(folder + "/config.json"), original);
}

TEST(DecoderTest, TokensAndLabelsOutsideTheVocabularyAreErrors) {
  const absl::StatusOr<ModelConfig> config = LoadModelConfig("tests/golden/qwen2/config.json");
  ASSERT_TRUE(config.ok()) << config.status();
  const Decoder decoder(*config, 1, Recompute::kNone);
  DenseAttention attention;
  const torch::Tensor positions = torch::arange(3);
  const torch::Tensor inside = torch::tensor({0, 1, 60}, torch::kInt64);
  const torch::Tensor outside = torch::tensor({0, 1, 61}, torch::kInt64);
  EXPECT_THROW(decoder.Forward(outside, positions, 3, attention), c10::Error);
  const torch::Tensor hidden = decoder.Forward(inside, positions, 3, attention);
  EXPECT_THROW(decoder.Loss(hidden, outside), c10::Error);
  EXPECT_NO_THROW(decoder.Loss(hidden, inside));
}

// A trainer chooses by the memory it finds, which may differ from one attempt to the next.
TEST(DecoderTest, RecomputingDoesNotChangeABit) {
  const absl::StatusOr<ModelConfig> config = LoadModelConfig("tests/golden/qwen2/config.json");
  ASSERT_TRUE(config.ok()) << config.status();
  const auto gradients = [&](Recompute recompute) {
    Decoder decoder(*config, 1, recompute);
    InitializeParameters(*config, decoder.layout(), 1, 0, decoder.layout().elements,
                         decoder.parameters());
    DenseAttention attention;
    const torch::Tensor tokens = torch::arange(48) % 7;
    const torch::Tensor hidden = decoder.Forward(tokens, torch::arange(48), 48, attention);
    decoder.Loss(hidden, tokens).sum.backward();
    return std::vector<float>(decoder.gradients(), decoder.gradients() + decoder.padded_elements());
  };
  EXPECT_EQ(gradients(Recompute::kNone), gradients(Recompute::kFull));
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const std::string& name : GoldenNames()) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kFull}) {
      cases.push_back({name, recompute});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, GoldenTest, testing::ValuesIn(Cases()), [](const auto& info) {
  std::string name = info.param.name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name + (info.param.recompute == Recompute::kFull ? "_recompute" : "_keep");
});

}  // namespace
}  // namespace ringleader::model
