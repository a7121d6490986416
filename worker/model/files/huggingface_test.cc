#include "worker/model/files/huggingface.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/files.h"
#include "base/process/progress.h"
#include "base/testing/temp_dir.h"
#include "worker/model/files/safetensors.h"

namespace ringleader::model {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

class HuggingFaceTest : public testing::Test {
 protected:
  void SetUp() override {
    auto config = LoadModelConfig("tests/golden/llama/config.json");
    ASSERT_TRUE(config.ok()) << config.status();
    config_ = *std::move(config);
    layout_ = MakeParameterLayout(config_);
    values_.resize(layout_.elements);
    InitializeParameters(config_, layout_, 3, 0, layout_.elements, values_.data());
  }

  absl::Status Export(int64_t max_shard_bytes = int64_t{5} << 30) {
    return ExportModel(folder_, config_, layout_, values_.data(),
                       {.max_shard_bytes = max_shard_bytes});
  }
  absl::Status Load(const ModelConfig& config) {
    const ParameterLayout layout = MakeParameterLayout(config);
    loaded_.assign(layout.elements, -1.0f);
    return LoadWeights(folder_, config, layout, loaded_.data());
  }

  // Writes one file with all tensors that `keep` lets through.
  template <typename Keep>
  void WriteSingle(Keep keep) {
    std::vector<TensorSource> tensors;
    for (const ParameterSlot& slot : layout_.slots) {
      TensorSource tensor{
          .name = slot.name,
          .shape = slot.shape,
          .bytes = std::as_bytes(std::span(values_).subspan(slot.offset, slot.elements))};
      if (keep(tensor)) tensors.push_back(tensor);
    }
    fs::create_directories(folder_);
    ASSERT_TRUE(WriteSafetensors(folder_ + "/model.safetensors", tensors).ok());
  }

  TempDir temp_;
  const std::string folder_ = temp_.File("export");
  ModelConfig config_;
  ParameterLayout layout_;
  std::vector<float> values_, loaded_;
};

TEST_F(HuggingFaceTest, AnyRangeLoadsAsThatPartOfTheWhole) {
  ASSERT_TRUE(Export(/*max_shard_bytes=*/4096).ok());
  for (const int ranks : {1, 2, 5}) {
    const int64_t shard = layout_.ShardElements(ranks);
    std::vector<float> joined;
    for (int rank = 0; rank < ranks; ++rank) {
      std::vector<float> part(shard, -1.0f);
      const absl::Status status =
          LoadWeights(folder_, config_, layout_, rank * shard, shard, part.data());
      ASSERT_TRUE(status.ok()) << status;
      joined.insert(joined.end(), part.begin(), part.end());
    }
    for (int64_t i = 0; i < layout_.elements; ++i) ASSERT_EQ(joined[i], values_[i]) << i;
    EXPECT_THAT(std::vector<float>(joined.begin() + layout_.elements, joined.end()),
                testing::Each(0.0f));
  }
}

TEST_F(HuggingFaceTest, ShardedExportComesBack) {
  ASSERT_TRUE(Export(/*max_shard_bytes=*/16 << 10).ok());
  EXPECT_FALSE(fs::exists(folder_ + "/model.safetensors"));
  const auto index = nlohmann::json::parse(*ReadFile(folder_ + "/model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], layout_.ParameterCount() * 4);
  EXPECT_EQ(index["weight_map"].size(), layout_.slots.size());
  EXPECT_EQ(index["weight_map"]["lm_head.weight"], "model-00005-of-00005.safetensors");
  const absl::Status status = Load(config_);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(loaded_, values_);
}

TEST_F(HuggingFaceTest, AnExportReplacesTheOneBeforeAndLeavesNothingBehind) {
  ASSERT_TRUE(Export(16 << 10).ok());
  values_[0] += 1.0f;
  ASSERT_TRUE(Export().ok());
  EXPECT_FALSE(fs::exists(folder_ + "/model.safetensors.index.json"));
  ASSERT_TRUE(Load(config_).ok());
  EXPECT_EQ(loaded_, values_);
  EXPECT_EQ(std::distance(fs::directory_iterator(temp_.path()), fs::directory_iterator()), 1);
}

// transformers reads is_causal; a mask that it has no word for is carried. The last one counts.
TEST_F(HuggingFaceTest, AnExportSaysUnderWhichMaskItWasTrained) {
  const auto exported = [&](const std::string& mask) {
    EXPECT_TRUE(ExportModel(folder_, config_, layout_, values_.data(), {.mask = mask}).ok());
    config_ = LoadModelConfig(folder_ + "/config.json").value();  // what is trained on from there
    return nlohmann::json::parse(ReadFile(folder_ + "/config.json").value());
  };
  EXPECT_FALSE(exported("causal").contains("is_causal"));
  EXPECT_EQ(exported("full").at("is_causal"), false);
  const nlohmann::json prefix = exported("prefix_lm");
  EXPECT_FALSE(prefix.contains("is_causal"));
  EXPECT_EQ(prefix.at("ringleader_attention_mask"), "prefix_lm");
  EXPECT_FALSE(exported("causal").contains("ringleader_attention_mask"));
}

// What of an export was written when it was killed is of another model.
TEST_F(HuggingFaceTest, NothingOfAnExportThatWasKilledIsExported) {
  fs::create_directories(folder_ + ".new");
  std::ofstream(folder_ + ".new/tokenizer.json") << "{}";
  ASSERT_TRUE(Export().ok());
  EXPECT_FALSE(fs::exists(folder_ + "/tokenizer.json"));
  EXPECT_TRUE(fs::exists(folder_ + "/model.safetensors"));
}

TEST_F(HuggingFaceTest, AFullDiskKeepsTheExportBefore) {
  ASSERT_TRUE(Export().ok());
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit limit{.rlim_cur = 10000, .rlim_max = before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &limit);
  const absl::Status status = Export();
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr("model.safetensors"));
  EXPECT_TRUE(Load(config_).ok());
  EXPECT_EQ(std::distance(fs::directory_iterator(temp_.path()), fs::directory_iterator()), 1);
}

TEST_F(HuggingFaceTest, AnExportInBFloat16ComesBackRounded) {
  const std::vector<float> before = values_;
  ASSERT_TRUE(ExportModel(folder_, config_, layout_, values_.data(),
                          {.type = StoredType::kBFloat16, .max_shard_bytes = 16 << 10})
                  .ok());
  const auto index = nlohmann::json::parse(*ReadFile(folder_ + "/model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], layout_.ParameterCount() * 2);
  EXPECT_EQ(nlohmann::json::parse(*ReadFile(folder_ + "/config.json"))["torch_dtype"], "bfloat16");
  const absl::Status status = Load(config_);
  ASSERT_TRUE(status.ok()) << status;
  for (const ParameterSlot& slot : layout_.slots) {
    for (int64_t i = slot.offset; i < slot.offset + slot.elements; ++i) {
      ASSERT_NEAR(loaded_[i], before[i], std::abs(before[i]) / 256) << slot.name;
    }
  }
  values_ = before;
  values_[layout_.slots[1].offset] = std::numeric_limits<float>::max();
  EXPECT_THAT(std::string(ExportModel(folder_, config_, layout_, values_.data(),
                                      {.type = StoredType::kBFloat16})
                              .message()),
              HasSubstr("tensor " + layout_.slots[1].name + ": 3.40282e+38 at element 0"));
  EXPECT_TRUE(Load(config_).ok()) << "the export before is as it was";
}

TEST_F(HuggingFaceTest, CompanionsLieBesideTheWeights) {
  const std::string binary("\0\xff{}", 4);
  ASSERT_TRUE(ExportModel(folder_, config_, layout_, values_.data(),
                          {.companions = {{"tokenizer.json", binary},
                                          {"additional_chat_templates/rag.jinja", "{{ x }}"}}})
                  .ok());
  EXPECT_EQ(*ReadFile(folder_ + "/tokenizer.json"), binary);
  EXPECT_EQ(*ReadFile(folder_ + "/additional_chat_templates/rag.jinja"), "{{ x }}");
  ASSERT_TRUE(Load(config_).ok());
  ASSERT_TRUE(Export().ok());
  EXPECT_FALSE(fs::exists(folder_ + "/tokenizer.json")) << "it is another model's";
}

TEST_F(HuggingFaceTest, ErrorsNameTheTensor) {
  EXPECT_EQ(Load(config_).code(), absl::StatusCode::kNotFound);

  WriteSingle([](TensorSource& tensor) { return tensor.name != "model.norm.weight"; });
  absl::Status status = Load(config_);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("tensor model.norm.weight is in none"));

  WriteSingle([](TensorSource& tensor) {
    if (tensor.name == "model.norm.weight") tensor.name = "model.norm.bias";
    return true;
  });
  EXPECT_THAT(std::string(Load(config_).message()),
              HasSubstr("tensor model.norm.bias is not part of the model"));

  WriteSingle([](TensorSource& tensor) {
    if (tensor.name == "lm_head.weight") std::swap(tensor.shape[0], tensor.shape[1]);
    return true;
  });
  EXPECT_THAT(std::string(Load(config_).message()),
              AllOf(HasSubstr("lm_head.weight is [32, 61]"), HasSubstr("makes it [61, 32]")));
}

TEST_F(HuggingFaceTest, WhatIsNotFiniteIsNotExported) {
  values_[layout_.slots[1].offset] = std::numeric_limits<float>::quiet_NaN();
  const absl::Status status = Export();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(layout_.slots[1].name), HasSubstr("NaN or infinite")));
}

TEST_F(HuggingFaceTest, TheHeadOfATiedModelMayBeThereAndHasToBeItsEmbedding) {
  ModelConfig tied = config_;
  tied.tied_embeddings = true;
  std::span<const std::byte> embedding;
  for (const ParameterSlot& slot : layout_.slots) {
    if (slot.name != "model.embed_tokens.weight") continue;
    embedding = std::as_bytes(std::span(values_).subspan(slot.offset, slot.elements));
  }
  WriteSingle([&](TensorSource& tensor) {
    if (tensor.name == "lm_head.weight") tensor.bytes = embedding;
    return true;
  });
  EXPECT_EQ(Load(tied), absl::OkStatus());
  // Trained apart, it would be lost.
  WriteSingle([](TensorSource&) { return true; });
  EXPECT_THAT(std::string(Load(tied).message()),
              AllOf(HasSubstr("tensor lm_head.weight is not model.embed_tokens.weight"),
                    HasSubstr("\"tie_word_embeddings\": false")));
  // Each rank looks at its part.
  const ParameterLayout layout = MakeParameterLayout(tied);
  const int64_t half = layout.elements / 2;
  for (const int64_t first : {int64_t{0}, half}) {
    bool has_embedding = false;
    for (const ParameterSlot& slot : layout.slots) {
      has_embedding |= slot.name == "model.embed_tokens.weight" && slot.offset < first + half &&
                       slot.offset + slot.elements > first;
    }
    loaded_.assign(half, 0.0f);
    EXPECT_EQ(LoadWeights(folder_, tied, layout, first, half, loaded_.data()).ok(), !has_embedding)
        << first;
  }
}

// Some exporters add them; config.json has the frequencies.
TEST_F(HuggingFaceTest, RotaryFrequenciesMayBeThereAndAreIgnored) {
  std::vector<TensorSource> tensors;
  for (const ParameterSlot& slot : layout_.slots) {
    tensors.push_back(
        {.name = slot.name,
         .shape = slot.shape,
         .bytes = std::as_bytes(std::span(values_).subspan(slot.offset, slot.elements))});
  }
  tensors.push_back({.name = "model.layers.0.self_attn.rotary_emb.inv_freq",
                     .shape = {2},
                     .bytes = std::as_bytes(std::span(values_).first(2))});
  fs::create_directories(folder_);
  ASSERT_TRUE(WriteSafetensors(folder_ + "/model.safetensors", tensors).ok());
  const uint64_t before = Progress::count();
  const absl::Status status = Load(config_);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(loaded_, values_);
  EXPECT_EQ(Progress::count(), before + layout_.slots.size()) << "large ones take minutes";
}

TEST_F(HuggingFaceTest, AnIndexBesideAnotherFileIsRefusedAndNamesEachTensorOnce) {
  ASSERT_TRUE(Export(16 << 10).ok());
  WriteSingle([](TensorSource&) { return true; });
  EXPECT_THAT(std::string(Load(config_).message()),
              HasSubstr("both model.safetensors and the shards of model.safetensors.index.json"));
  WriteSingle([](TensorSource&) { return true; });
  nlohmann::json index =
      nlohmann::json::parse(*ReadFile(folder_ + "/model.safetensors.index.json"));
  index["weight_map"]["lm_head.weight"] = "model.safetensors";
  std::ofstream(folder_ + "/model.safetensors.index.json") << index;
  const absl::Status twice = Load(config_);
  EXPECT_EQ(twice.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(twice.message()), HasSubstr("is in another file too"));
}

TEST_F(HuggingFaceTest, AnIndexMayNotLeadOutOfTheFolder) {
  ASSERT_TRUE(Export(16 << 10).ok());
  std::ofstream(folder_ + "/model.safetensors.index.json")
      << R"({"weight_map": {"model.norm.weight": "../../etc/passwd"}})";
  const absl::Status status = Load(config_);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("model.norm.weight"));
  std::ofstream(folder_ + "/model.safetensors.index.json") << "{]";
  EXPECT_EQ(Load(config_).code(), absl::StatusCode::kDataLoss);
  fs::remove(folder_ + "/model.safetensors.index.json");
  fs::create_symlink("/dev/zero", folder_ + "/model.safetensors.index.json");
  EXPECT_THAT(std::string(Load(config_).message()), HasSubstr("is a device"));
}

}  // namespace
}  // namespace ringleader::model
