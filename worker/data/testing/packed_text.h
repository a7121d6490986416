// Text in a folder of its own, and the shards that it is packed into.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "base/testing/temp_dir.h"
#include "worker/data/loader.h"
#include "worker/data/pack/pack_folder.h"

namespace ringleader::data::testing {

class PackedTextTest : public ::testing::Test {
 protected:
  void AddText(const std::string& name, const std::string& text) {
    std::filesystem::create_directories((folder_ / "text" / name).parent_path());
    std::ofstream(folder_ / "text" / name, std::ios::binary) << text;
  }
  PackOptions Options() const {
    PackOptions options;
    options.paths = {(folder_ / "text").string()};
    options.output = (folder_ / "tokens").string();
    options.eval_share = 0;
    return options;
  }
  std::string Train() const { return (folder_ / "tokens/train").string(); }
  std::string Shard() const { return Train() + "/shard-00000.tokens"; }

  static void FlipByte(const std::string& path, int64_t offset) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(offset);
    const char byte = static_cast<char>(file.get() ^ 0x40);
    file.seekp(offset);
    file.put(byte);
  }

  // What Pack says of these options.
  static std::string Complaint(const PackOptions& options) {
    return std::string(Pack(options).status().message());
  }

 private:
  TempDir directory_;

 protected:
  const std::filesystem::path folder_ = directory_.path();
};

// A micro-batch of one.
inline LocalSequence ReadOne(const Loader& loader, const Sample& sample,
                             const kernels::ShardLayout& layout) {
  return loader.Read({&sample, 1}, layout);
}

// The tokens as text, with '|' for the end of a document.
inline std::string TextOf(const TokenFolder& folder) {
  std::string text;
  for (uint64_t i = 0; i < folder.tokens(); ++i) {
    const uint32_t token = folder.token(i);
    text += token == kByteSeparator ? '|' : static_cast<char>(token);
  }
  return text;
}

}  // namespace ringleader::data::testing
