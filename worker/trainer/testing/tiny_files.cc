#include "worker/trainer/testing/tiny_files.h"

#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "worker/data/pack/pack_folder.h"

namespace ringleader::trainer::testing {
namespace {

constexpr char kConfig[] = R"({
  "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 257,
  "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
  "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
  "rope_theta": 10000.0, "tie_word_embeddings": true, "hidden_act": "silu"
})";

// Regular enough that a few steps teach something.
void WriteText(const std::string& directory) {
  std::filesystem::create_directories(directory + "/text");
  for (int file = 0; file < 40; ++file) {
    std::ofstream out(absl::StrCat(directory, "/text/", file, ".txt"));
    for (int line = 0; line < 30; ++line) {
      out << "line " << line * (file + 7) % 91 << " of file " << file << ": one more of them\n";
    }
  }
}

}  // namespace

void WriteTinyFiles(const std::string& directory) {
  const std::string tokens = directory + "/tokens";
  if (std::filesystem::exists(tokens)) return;
  WriteText(directory);
  std::ofstream(directory + "/config.json") << kConfig;
  data::PackOptions pack;
  pack.paths = {directory + "/text"};
  pack.output = tokens;
  pack.eval_share = 0.2;
  if (const auto packed = data::Pack(pack); !packed.ok()) {
    throw std::runtime_error(packed.status().ToString());
  }
}

}  // namespace ringleader::trainer::testing
