// Jobs and clusters for the planner's tests.
#pragma once

#include "coordinator/planner/planner.h"
#include "jobspec/jobspec.h"

namespace ringleader::planner {

// Qwen2.5-3B's shape.
inline ModelShape ThreeBillion() {
  return {.vocab_size = 151936,
          .hidden_size = 2048,
          .intermediate_size = 11008,
          .layers = 36,
          .heads = 16,
          .kv_heads = 2,
          .head_dim = 128,
          .tied_embeddings = true};
}

// vertical_slash with `context` trainers over `tokens`, defaults filled in.
inline v1::JobSpec LongJob(uint32_t context, uint64_t tokens) {
  v1::JobSpec spec;
  spec.set_name("long");
  spec.mutable_data()->set_sequence_length(tokens);
  spec.mutable_parallelism()->set_context(context);
  spec.mutable_resources()->set_trainers(context);
  spec.mutable_resources()->set_engine(v1::ResourcesSpec::CUDA);
  jobspec::ApplyDefaults(&spec);
  return spec;
}

}  // namespace ringleader::planner
