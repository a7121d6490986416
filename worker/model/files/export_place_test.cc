#include "worker/model/files/export_place.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/files.h"
#include "base/testing/temp_dir.h"

namespace ringleader::model {
namespace {

namespace fs = std::filesystem;

class ExportPlaceTest : public ::testing::Test {
 protected:
  // Returns where the export went, which says "new".
  std::string Place() {
    Write(".fresh/config.json", "new");
    Write(".fresh/model.safetensors", "new");
    const absl::StatusOr<std::string> place =
        PlaceExport(directory_ / ".fresh", directory_, "model-token-7");
    EXPECT_TRUE(place.ok()) << place.status();
    EXPECT_EQ(Read(fs::path(*place) / "config.json"), "new");
    EXPECT_FALSE(fs::exists(directory_ / ".fresh"));
    EXPECT_FALSE(fs::exists(directory_ / ".model.replaced"));
    return fs::path(*place).filename();
  }
  void Write(const std::string& name, const std::string& text) {
    fs::create_directories((directory_ / name).parent_path());
    std::ofstream(directory_ / name) << text;
  }
  static std::string Read(const fs::path& path) {
    const absl::StatusOr<std::string> text = ReadFile(path);
    return text.ok() ? *text : std::string(text.status().message());
  }

  const TempDir temp_;
  const fs::path directory_ = temp_.path();
};

TEST_F(ExportPlaceTest, TakesThePlaceOfNothingAndOfAnotherExport) {
  EXPECT_EQ(Place(), "model");
  Write("model/model-00001-of-00002.safetensors", "old");
  Write("model/model.safetensors.index.json", "old");
  Write(".fresh/additional_chat_templates/tools.jinja", "new");
  EXPECT_EQ(Place(), "model");
  // With a folder in it.
  Write(".fresh/additional_chat_templates/tools.jinja", "new");
  EXPECT_EQ(Place(), "model");
  EXPECT_EQ(Read(directory_ / "model/additional_chat_templates/tools.jinja"), "new");
  EXPECT_FALSE(fs::exists(directory_ / "model/model-00001-of-00002.safetensors"));
}

TEST_F(ExportPlaceTest, CheckpointsOfAnotherJobAndFilesOfPeopleStay) {
  for (const char* const other :
       {"model/owner.json", "model/step-4/manifest.json", "model/notes.txt",
        "model/step-4/model.safetensors", "model/additional_chat_templates/notes.txt"}) {
    fs::remove_all(directory_ / "model");
    Write(other, "theirs");
    EXPECT_EQ(Place(), "model-token-7") << other;
    EXPECT_EQ(Read(directory_ / other), "theirs");
    EXPECT_EQ(Place(), "model-token-7") << "again, as a retry does";
  }
}

// The name that somebody gives what stood in the way.
TEST_F(ExportPlaceTest, WhatWasMovedAwayStays) {
  Place();
  Write("model.old/model.safetensors", "theirs");
  EXPECT_EQ(Place(), "model");
  EXPECT_EQ(Read(directory_ / "model.old/model.safetensors"), "theirs");
}

TEST_F(ExportPlaceTest, AFileOrALinkIsNoExport) {
  Write("model", "theirs");
  EXPECT_EQ(Place(), "model-token-7");
  fs::remove(directory_ / "model");
  fs::create_symlink("nowhere", directory_ / "model");
  EXPECT_EQ(Place(), "model-token-7");
}

}  // namespace
}  // namespace ringleader::model
