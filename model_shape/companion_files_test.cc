#include "model_shape/companion_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "base/testing/temp_dir.h"

namespace ringleader::model {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

TEST(CompanionFilesTest, AreThoseOfTheTokenizerAndOfGeneration) {
  const TempDir folder;
  for (const char* name : {"tokenizer.json", "generation_config.json", "chat_template.jinja",
                           "config.json", "model.safetensors", "README.md", "tokenizer.json.bak"}) {
    std::ofstream(folder.File(name)) << "of " << name;
  }
  fs::create_directory(folder.File("additional_chat_templates"));
  std::ofstream(folder.File("additional_chat_templates/rag.jinja")) << "rag";
  std::ofstream(folder.File("additional_chat_templates/notes.txt")) << "no";
  const auto files = ReadCompanionFiles(folder.path().string());
  ASSERT_TRUE(files.ok()) << files.status();
  EXPECT_THAT(*files, ElementsAre(Pair("additional_chat_templates/rag.jinja", "rag"),
                                  Pair("chat_template.jinja", "of chat_template.jinja"),
                                  Pair("generation_config.json", "of generation_config.json"),
                                  Pair("tokenizer.json", "of tokenizer.json")));
  EXPECT_THAT(ReadCompanionFiles(folder.File("absent")).value(), ElementsAre());
}

TEST(CompanionFilesTest, WhatCannotBeReadIsNamed) {
  const TempDir folder;
  const auto complaint = [&] {
    return std::string(ReadCompanionFiles(folder.path().string()).status().message());
  };
  fs::create_symlink(folder.File("gone"), folder.File("merges.txt"));
  EXPECT_THAT(complaint(), HasSubstr("merges.txt"));
  fs::remove(folder.File("merges.txt"));
  fs::create_directory(folder.File("vocab.json"));
  EXPECT_THAT(complaint(), HasSubstr("vocab.json is a folder"));
  fs::remove(folder.File("vocab.json"));
  ASSERT_EQ(mkfifo(folder.File("vocab.txt").c_str(), 0600), 0);
  EXPECT_THAT(complaint(), HasSubstr("vocab.txt is a pipe"));
  fs::remove(folder.File("vocab.txt"));
  std::ofstream(folder.File("tokenizer.json")) << "x";
  fs::resize_file(folder.File("tokenizer.json"), uint64_t{1} << 40);  // a hole
  EXPECT_THAT(complaint(), HasSubstr("tokenizer.json has 1099511627776 bytes"));
}

TEST(CompanionFilesTest, LieInTheModelsFolderOrBesideItsConfig) {
  EXPECT_EQ(CompanionFolder("", "/models/qwen"), "/models/qwen");
  EXPECT_EQ(CompanionFolder("/models/qwen/config.json", "random"), "/models/qwen");
  EXPECT_EQ(CompanionFolder("/models/qwen/config.json", ""), "/models/qwen");
}

}  // namespace
}  // namespace ringleader::model
