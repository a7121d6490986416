#include "worker/trainer/testing/tiny_job.h"

#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "worker/data/pack_folder.h"

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

v1::JobSpec TinyJob(const std::string& directory, int context, int data) {
  const std::string tokens = directory + "/tokens";
  if (!std::filesystem::exists(tokens)) {
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
  v1::JobSpec spec;
  spec.set_name("tiny");
  spec.mutable_model()->set_config(directory + "/config.json");
  spec.mutable_model()->set_init("random");
  spec.mutable_data()->set_train(tokens + "/train");
  spec.mutable_data()->set_eval(tokens + "/eval");
  spec.mutable_data()->set_sequence_length(kTinySequence);
  spec.mutable_attention()->set_pattern(v1::AttentionSpec::VERTICAL_SLASH);
  spec.mutable_attention()->set_tile(64);
  spec.mutable_attention()->set_sink_tokens(64);
  spec.mutable_parallelism()->set_context(context);
  spec.mutable_parallelism()->set_data(data);
  v1::TrainingSpec* training = spec.mutable_training();
  training->set_steps(6);
  training->set_global_batch(2);
  training->set_learning_rate(3e-3);
  training->set_warmup_steps(2);
  training->set_seed(1);
  training->set_eval_sequences(2);
  spec.mutable_checkpoint()->set_directory(directory + "/checkpoints");
  spec.mutable_checkpoint()->set_every_steps(2);
  spec.mutable_resources()->set_trainers(context * data);
  return spec;
}

v1::StepPlan TinyPlan(const v1::JobSpec& spec) {
  v1::StepPlan plan;
  plan.set_version(1);
  plan.set_effective_step(1);
  plan.mutable_ring()->set_kind(v1::ParallelismSpec::FLAT);
  plan.mutable_ring()->set_inner(spec.parallelism().context());
  plan.mutable_ring()->set_outer(1);
  plan.set_layout(v1::ParallelismSpec::STRIPED);
  plan.set_stripe(spec.attention().tile());
  return plan;
}

}  // namespace ringleader::trainer::testing
