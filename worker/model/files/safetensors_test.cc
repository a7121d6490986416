#include "worker/model/files/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>

#include "base/files.h"
#include "base/testing/temp_dir.h"

namespace ringleader::model {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::ElementsAreArray;
using testing::HasSubstr;

std::string Message(const absl::Status& status) {
  return std::string(status.message());
}

std::vector<float> Read(const SafetensorsFile& file, const std::string& name) {
  for (const StoredTensor& tensor : file.header().tensors) {
    if (tensor.name != name) continue;
    std::vector<float> values(tensor.elements());
    EXPECT_TRUE(file.ReadFloats(tensor, values).ok());
    return values;
  }
  ADD_FAILURE() << "no tensor " << name;
  return {};
}

class SafetensorsTest : public testing::Test {
 protected:
  void WriteTwo() {
    ASSERT_TRUE(WriteSafetensors(
                    path_, {{.name = "a", .shape = {2, 3}, .bytes = std::as_bytes(std::span(a_))},
                            {.name = "b", .shape = {2}, .bytes = std::as_bytes(std::span(b_))}})
                    .ok());
  }
  void WriteRaw(const std::string& bytes) {
    std::filesystem::remove(path_);  // overwriting in place makes some file systems sync
    std::ofstream(path_, std::ios::binary) << bytes;
  }

  TempDir temp_;
  const std::string path_ = temp_.File("model.safetensors");
  const std::vector<float> a_ = {1, 2, 3, 4, 5, -0.5f};
  const std::vector<float> b_ = {1e-30f, 7};
};

TEST_F(SafetensorsTest, WhatIsWrittenIsRead) {
  WriteTwo();
  const auto file = SafetensorsFile::Open(path_);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_THAT(Read(**file, "a"), ElementsAreArray(a_));
  EXPECT_THAT(Read(**file, "b"), ElementsAreArray(b_));
  EXPECT_THAT((*file)->header().tensors[0].shape, ElementsAre(2, 3));
}

// tests/golden/dtypes.safetensors comes from the reference implementation.
TEST_F(SafetensorsTest, HalfPrecisionBecomesTheSameNumbers) {
  const auto file = SafetensorsFile::Open("tests/golden/dtypes.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_THAT(Read(**file, "bf16"), ElementsAreArray(Read(**file, "bf16.as_f32")));
  EXPECT_THAT(Read(**file, "f16"), ElementsAreArray(Read(**file, "f16.as_f32")));
}

TEST_F(SafetensorsTest, AFileCutOffAnywhereIsAnError) {
  WriteTwo();
  const std::string whole = *ReadFile(path_);
  for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
    WriteRaw(whole.substr(0, bytes));
    const auto file = SafetensorsFile::Open(path_);
    ASSERT_EQ(file.status().code(), absl::StatusCode::kDataLoss) << bytes;
    ASSERT_THAT(Message(file.status()), HasSubstr(path_));
  }
}

TEST_F(SafetensorsTest, AFlippedBitIsAnErrorOrLeavesTheTensorsAlone) {
  WriteTwo();
  const std::string whole = *ReadFile(path_);
  for (size_t bit = 0; bit < whole.size() * 8; ++bit) {
    std::string damaged = whole;
    damaged[bit / 8] ^= static_cast<char>(1 << (bit % 8));
    WriteRaw(damaged);
    const auto file = SafetensorsFile::Open(path_);
    if (!file.ok()) continue;
    // A changed name, shape or metadata entry parses; the numbers are still those that were
    // written.
    const auto& tensors = (*file)->header().tensors;
    ASSERT_EQ(tensors.size(), 2u) << bit;
    std::vector<float> values(6);
    ASSERT_TRUE((*file)->ReadFloats(tensors[0], values).ok());
    ASSERT_THAT(values, ElementsAreArray(a_)) << bit;
  }
}

// Ties go to the even neighbour; expected bits by hand.
TEST_F(SafetensorsTest, BFloat16IsRoundedToTheNearestInPlace) {
  std::vector<float> values = {1.0f,
                               -0.0f,
                               std::bit_cast<float>(0x3f808000u),   // a tie, down to 0x3f80
                               std::bit_cast<float>(0x3f818000u),   // a tie, up to 0x3f82
                               std::bit_cast<float>(0x3f808001u),   // above one
                               std::bit_cast<float>(0xbf817fffu),   // below one
                               std::bit_cast<float>(0x00008001u)};  // subnormal
  const auto packed = PackBFloat16(std::span(values));
  ASSERT_TRUE(packed.ok()) << packed.status();
  EXPECT_EQ(static_cast<const void*>(packed->data()), values.data());
  std::vector<uint16_t> halves(values.size());
  ASSERT_EQ(packed->size(), 2 * halves.size());
  std::memcpy(halves.data(), packed->data(), packed->size());
  EXPECT_THAT(halves, testing::ElementsAre(0x3f80, 0x8000, 0x3f80, 0x3f82, 0x3f81, 0xbf81, 0x0001));
  ASSERT_TRUE(
      WriteSafetensors(
          path_, {{.name = "h", .shape = {7}, .bytes = *packed, .type = StoredType::kBFloat16}})
          .ok());
  const auto file = SafetensorsFile::Open(path_);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->header().tensors[0].type, StoredType::kBFloat16);
  EXPECT_THAT(Read(**file, "h"), testing::Contains(-1.0078125f));
}

TEST_F(SafetensorsTest, WhatIsNotFiniteInBFloat16IsRefused) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::max()}) {
    std::vector<float> values = {1, bad};
    const auto packed = PackBFloat16(std::span(values));
    EXPECT_EQ(packed.status().code(), absl::StatusCode::kDataLoss) << bad;
    EXPECT_THAT(Message(packed.status()), HasSubstr("element 1 is not finite in bf16"));
  }
}

TEST_F(SafetensorsTest, NotANumberIsAnErrorThatNamesTheTensor) {
  const std::vector<float> bad = {1, std::numeric_limits<float>::quiet_NaN()};
  ASSERT_TRUE(
      WriteSafetensors(path_, {{.name = "w", .shape = {2}, .bytes = std::as_bytes(std::span(bad))}})
          .ok());
  const auto file = SafetensorsFile::Open(path_);
  ASSERT_TRUE(file.ok());
  std::vector<float> values(2);
  const absl::Status status = (*file)->ReadFloats((*file)->header().tensors[0], values);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Message(status), AllOf(HasSubstr("tensor w"), HasSubstr("element 1")));
}

TEST_F(SafetensorsTest, AFolderAMissingFileAndAnEmptyOneAreErrors) {
  EXPECT_EQ(SafetensorsFile::Open(path_).status().code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(SafetensorsFile::Open(temp_.path()).ok());
  WriteRaw("");
  EXPECT_EQ(SafetensorsFile::Open(path_).status().code(), absl::StatusCode::kDataLoss);
}

TEST(SafetensorsHeaderTest, RejectsWhatDoesNotTileTheFile) {
  const std::string a = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "not a JSON object"},
      {"[]", "not a JSON object"},
      {"{" + a + "," + a + "}", "tensor a stands in the header twice"},
      {"{" + a + "}", "hold 8 bytes, the file has 16"},
      {"{" + a + R"(,"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", "overlapping"},
      {"{" + a + R"(,"b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}})", "gap"},
      {R"({"b":{"dtype":"F32","shape":[4],"data_offsets":[8,24]}})", "tensor b: data_offsets"},
      {R"({"b":{"dtype":"F32","shape":[4],"data_offsets":[16,0]}})", "tensor b: data_offsets"},
      {R"({"b":{"dtype":"F32","shape":[3],"data_offsets":[0,16]}})", "need 12"},
      {R"({"b":{"dtype":"I64","shape":[2],"data_offsets":[0,16]}})", "supported: F32, BF16, F16"},
      {R"({"b":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}})", "shape"},
      {R"({"b":{"dtype":"F32","shape":[4.0],"data_offsets":[0,16]}})", "shape"},
      {R"({"b":{"dtype":"F32","shape":4,"data_offsets":[0,16]}})", "shape"},
      {R"({"b":{"dtype":"F32","shape":[16,16,16,16,16,16,16,16,16],"data_offsets":[0,16]}})",
       "shape"},
      {R"({"b":{"dtype":"F32","shape":[18446744073709551615,4],"data_offsets":[0,16]}})", "shape"},
      {R"({"b":{"dtype":"F32","shape":[4]}})", "needs dtype, shape and data_offsets"},
      {R"({"b":7})", "needs dtype, shape and data_offsets"},
      {R"({"__metadata__":{"a":1}})", "__metadata__"},
  };
  for (const auto& [json, message] : cases) {
    const auto header = ParseSafetensorsHeader(json, 16, "file");
    ASSERT_FALSE(header.ok()) << json;
    EXPECT_THAT(Message(header.status()), AllOf(HasSubstr("file: "), HasSubstr(message))) << json;
  }
}

// Whatever comes in, what is accepted must be safe to read.
TEST(SafetensorsHeaderTest, FuzzedHeadersNeverDescribeBytesOutsideTheFile) {
  const std::string valid =
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
      R"("b":{"dtype":"BF16","shape":[4],"data_offsets":[8,16]}})";
  ASSERT_TRUE(ParseSafetensorsHeader(valid, 16, "f").ok());
  const std::string alphabet = R"({}[]":,0123456789-eE.tFBab\u )";
  std::mt19937 random(7);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string json = valid;
    for (int edits = 1 + random() % 3; edits > 0; --edits) {
      const size_t at = random() % json.size();
      switch (random() % 4) {
        case 0:
          json[at] = static_cast<char>(random());
          break;
        case 1:
          json[at] = alphabet[random() % alphabet.size()];
          break;
        case 2:
          json.erase(at, 1 + random() % 8);
          break;
        default:
          json.insert(at, json.substr(random() % json.size(), random() % 24));
      }
      if (json.empty()) json = "{";
    }
    const auto header = ParseSafetensorsHeader(json, 16, "f");
    if (!header.ok()) continue;
    ++accepted;
    for (const StoredTensor& tensor : header->tensors) {
      ASSERT_LE(tensor.begin, tensor.end);
      ASSERT_LE(tensor.end, 16u);
      int64_t elements = 1;
      for (const int64_t size : tensor.shape) elements *= size;
      ASSERT_EQ(elements, tensor.elements());
    }
  }
  EXPECT_GT(accepted, 0);
}

TEST(SafetensorsHeaderTest, RandomBytesAreErrors) {
  std::mt19937 random(8);
  for (int i = 0; i < 10000; ++i) {
    std::string bytes(random() % 64, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    EXPECT_FALSE(ParseSafetensorsHeader(bytes, 16, "f").ok());
  }
}

}  // namespace
}  // namespace ringleader::model
