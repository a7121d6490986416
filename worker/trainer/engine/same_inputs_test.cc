#include "worker/trainer/engine/same_inputs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/testing/temp_dir.h"
#include "worker/comm/testing/run_ranks.h"

namespace ringleader::trainer {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(SameInputsTest, TheFirstThatDiffersIsNamedOnAllRanks) {
  for (const int odd : {0, 2, -1}) {  // the rank that reads something else; -1: none
    std::vector<absl::Status> found(3);
    comm::testing::RunRanks(3, [&](comm::Communicator& world) {
      const uint64_t data = world.rank() == odd ? 8 : 7;
      const std::vector<Input> inputs = {
          {"data.train", "/tokens", 5}, {"data.eval", "/held", data}, {"model.init", "/m", data}};
      found[world.rank()] = CheckSameInputs(inputs, world);
    });
    for (const absl::Status& status : found) {
      EXPECT_EQ(status.ok(), odd < 0) << status;
      if (odd < 0) continue;
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("data.eval: /held"), HasSubstr(odd == 0 ? "rank 1" : "rank 2")));
    }
  }
}

TEST(SameInputsTest, WeightsAreKnownByNamesSizesAndSamples) {
  const TempDir temp;
  const std::filesystem::path folder = temp.path();
  const auto write = [&](const std::string& name, const std::string& text) {
    std::ofstream(folder / name, std::ios::binary | std::ios::trunc) << text;
    const absl::StatusOr<uint64_t> digest = DigestOfWeights(folder);
    EXPECT_TRUE(digest.ok()) << digest.status();
    return digest.value_or(0);
  };
  std::string weights(3 << 20, 'w');
  const uint64_t first = write("model.safetensors", weights);
  EXPECT_EQ(write("tokenizer.json", "{}"), first) << "no weights";
  EXPECT_EQ(write("model.safetensors", weights), first);
  EXPECT_NE(write("model.safetensors", weights + 'w'), first);
  for (const size_t at : {size_t{9}, weights.size() - 1}) {
    std::string changed = weights;
    changed[at] = 'x';
    EXPECT_NE(write("model.safetensors", changed), first) << at;
  }
  // Weights that were trained on differ all over.
  EXPECT_NE(write("model.safetensors", std::string(weights.size(), 'x')), first);
  // Nobody reads what the index does not name: a download may have left half of it there.
  write("model.safetensors", weights);
  EXPECT_EQ(write("more.safetensors", "short"), first);
  std::filesystem::create_symlink("nowhere", folder / "unfinished.safetensors");
  EXPECT_EQ(write("tokenizer.json", "{}"), first);
  std::filesystem::rename(folder / "model.safetensors", folder / "half.safetensors");
  const std::string index = R"({"weight_map": {"a": "half.safetensors", "b": "more.safetensors"}})";
  const uint64_t both = write("model.safetensors.index.json", index);
  EXPECT_NE(both, first);
  EXPECT_NE(write("more.safetensors", "other"), both);
  // Which an attempt later, or on another node, may find.
  std::filesystem::remove(folder / "more.safetensors");
  EXPECT_EQ(DigestOfWeights(folder).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(DigestOfWeights("random").value(), 0u);
  EXPECT_FALSE(DigestOfWeights(folder / "none").ok());
}

}  // namespace
}  // namespace ringleader::trainer
