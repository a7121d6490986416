// Jobs and clusters for the planner's tests.
#pragma once

#include "coordinator/planner/planner.h"
#include "jobspec/jobspec.h"
#include "model_shape/model_config.h"

namespace ringleader::planner {

// Qwen2.5-3B's shape.
inline model::ModelConfig ThreeBillion() {
  model::ModelConfig model;
  model.vocab_size = 151936;
  model.hidden_size = 2048;
  model.intermediate_size = 11008;
  model.layers = 36;
  model.heads = 16;
  model.kv_heads = 2;
  model.head_dim = 128;
  model.tied_embeddings = true;
  return model;
}

// vertical_slash with `context` trainers over `tokens`, defaults filled in.
inline v1::JobSpec LongJob(uint32_t context, uint64_t tokens) {
  v1::JobSpec spec;
  spec.set_name("long");
  spec.mutable_data()->set_sequence_length(tokens);
  spec.mutable_attention()->set_pattern(v1::AttentionSpec::VERTICAL_SLASH);
  spec.mutable_parallelism()->set_context(context);
  spec.mutable_resources()->set_trainers(context);
  spec.mutable_resources()->set_engine(v1::ResourcesSpec::CUDA);
  jobspec::ApplyDefaults(&spec);
  return spec;
}

inline ClusterShape Gpus(int nodes, int per_node) {
  return TypicalCluster(v1::ResourcesSpec::CUDA, nodes, per_node);
}

}  // namespace ringleader::planner
