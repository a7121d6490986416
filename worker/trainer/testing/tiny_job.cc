#include "worker/trainer/testing/tiny_job.h"

#include "jobspec/values/attention_spec.h"

namespace ringleader::trainer::testing {

v1::JobSpec TinyJob(const std::string& directory, int context, int data) {
  WriteTinyFiles(directory);
  v1::JobSpec spec;
  spec.set_name("tiny");
  spec.mutable_model()->set_config(directory + "/config.json");
  spec.mutable_model()->set_init("random");
  spec.mutable_data()->set_train(directory + "/tokens/train");
  spec.mutable_data()->set_eval(directory + "/tokens/eval");
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
  plan.mutable_ring()->set_inner(jobspec::RingRanks(spec.parallelism()));
  plan.mutable_ring()->set_outer(1);
  plan.set_layout(v1::ParallelismSpec::STRIPED);
  plan.set_stripe(spec.attention().tile());
  return plan;
}

}  // namespace ringleader::trainer::testing
