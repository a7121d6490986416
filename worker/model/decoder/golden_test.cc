// Parity with Hugging Face: the models under tests/golden and what transformers computed for them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/testing/temp_dir.h"
#include "worker/model/decoder/decoder.h"
#include "worker/model/files/huggingface.h"
#include "worker/model/files/safetensors.h"
#include "worker/model/testing/dense_context_attention.h"
#include "worker/model/testing/flat_store.h"
#include "worker/model/testing/golden_batch.h"
#include "worker/model/token_ops/cpu_token_ops.h"

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
  const Golden golden = LoadGolden(GetParam().name);
  const auto ops = NewCpuTokenOps(/*threads=*/1);
  FlatStore store(golden.layout, golden.values, torch::kCPU, torch::kFloat);
  Decoder decoder(golden.config, *ops, store, {.recompute = {.recompute = GetParam().recompute}});
  const TokenBatch batch = BatchOf(golden);
  DenseContextAttention attention;
  const torch::Tensor difference =
      (decoder.Logits(batch, attention) - golden.expected.at("logits")).abs().max();
  EXPECT_LE(difference.item<double>(), 1e-4);
  EXPECT_EQ(batch.labels.ne(kIgnoreLabel).sum().item<int64_t>(), batch.tokens.size(0) - 4);

  // Runs twice, because gradients must add up in place.
  for (int i = 0; i < 2; ++i) {
    const torch::Tensor loss = decoder.ForwardBackward(batch, attention);
    EXPECT_EQ(loss.scalar_type(), torch::kFloat64);
    EXPECT_NEAR(loss.item<double>(), golden.expected.at("loss").item<double>(), 2e-3);
  }
  for (const ParameterSlot& slot : golden.layout.slots) {
    const torch::Tensor gradient =
        store.gradients().narrow(0, slot.offset, slot.elements).view(slot.shape) / 2;
    EXPECT_LE(RelativeError(gradient, golden.expected.at("grad." + slot.name)), 1e-3) << slot.name;
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
  const Golden golden = LoadGolden("qwen2");
  const auto ops = NewCpuTokenOps(/*threads=*/1);
  FlatStore store(golden.layout, golden.values, torch::kCPU, torch::kFloat);
  Decoder decoder(golden.config, *ops, store, {});
  DenseContextAttention attention;
  const torch::Tensor inside = torch::tensor({0, 1, 60}, torch::kInt64);
  const torch::Tensor outside = torch::tensor({0, 1, 61}, torch::kInt64);
  const auto loss = [&](const torch::Tensor& tokens, const torch::Tensor& labels) {
    decoder.Score(
        {.tokens = tokens, .positions = torch::arange(3), .labels = labels, .sequence_length = 3},
        attention);
  };
  EXPECT_THROW(loss(outside, inside), c10::Error);
  EXPECT_THROW(loss(inside, outside), c10::Error);
  EXPECT_NO_THROW(loss(inside, inside));
}

// A trainer chooses by the memory it finds, which may differ from one attempt to the next, and so
// may the cores.
TEST(DecoderTest, NeitherRecomputingNorThreadsChangeABit) {
  for (const std::string& name : GoldenNames()) {
    const Golden golden = LoadGolden(name);
    const auto gradients = [&](const RecomputePlan& plan, int threads) {
      const auto ops = NewCpuTokenOps(threads);
      FlatStore store(golden.layout, golden.values, torch::kCPU, torch::kFloat);
      Decoder decoder(golden.config, *ops, store, {.recompute = plan});
      DenseContextAttention attention;
      const torch::Tensor tokens = torch::arange(600) % 7;
      decoder.ForwardBackward({.tokens = tokens,
                               .positions = torch::arange(600),
                               .labels = tokens,
                               .sequence_length = 600},
                              attention);
      return store.gradients();
    };
    const torch::Tensor full = gradients({.recompute = Recompute::kFull}, 1);
    EXPECT_TRUE(torch::equal(gradients({.recompute = Recompute::kFull}, 3), full)) << name;
    EXPECT_TRUE(torch::equal(gradients({.recompute = Recompute::kNone}, 2), full)) << name;
    const RecomputePlan some{.recompute = Recompute::kAttentionOnly, .kept_layers = 1};
    EXPECT_TRUE(torch::equal(gradients(some, 1), full)) << name;
  }
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
