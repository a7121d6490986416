// The cases of training_bench, as jobs and as plans of them.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "model_shape/model_config.h"
#include "ringleader/v1/job_spec.pb.h"
#include "ringleader/v1/plan.pb.h"

namespace ringleader::bench {

struct TrainingCase {
  int gpus = 1;                        // ranks, one a GPU
  int64_t tokens = 0;                  // of the one sequence of a step
  std::string mode = "dense";          // dense, sparse, or a pattern's name
  int heads = 1;                       // parallelism.heads; the ring is of gpus / heads
  std::string ring = "auto";           // auto, flat, hierarchical or all_gather; auto is flat
  std::string layout = "striped";      // or documents
  std::string precision = "bfloat16";  // training.precision
  uint64_t dense_below = 0;            // attention.dense_below of sparse cases
};

// What all cases of a call have alike.
struct CaseOptions {
  std::string config;  // config.json of the model
  std::string engine = "cuda";
  std::string documents;  // a LengthDistribution's name, or a length; empty: a sequence is one
  int nodes = 1;          // machines that NCCL takes the GPUs for, in equal parts
  double inter_node_gbytes = 0;  // GB/s of a GPU to another of them, for plans; 0: as is usual
  std::string recompute = "auto", offload = "auto", kv_gradients = "float32";
  int steps = 3;
  // Of sparse cases, a head: columns, and the share of all block diagonals.
  uint32_t verticals = 2621;
  double slash_share = 0.055;
  double density = 0.05;        // of cases named by a pattern; 0: the pattern's defaults hold
  uint32_t group_queries = 64;  // attention.group_queries of key_groups
  uint32_t group_heads = 1;     // attention.group_heads
};

// The job of a case, on the tokens that are packed in `folder`, where it has its checkpoints, too.
// It has more steps than are measured, because its end, with a checkpoint, is not. An error where
// the mode keeps no share, or the options do not go together.
absl::StatusOr<v1::JobSpec> MakeSpec(const CaseOptions& options, const TrainingCase& run,
                                     const std::string& folder);

// Its plan: what the case says, and for documents the weights that jobs get on machines of which
// nobody has measured more than the links between them. Errors are those of planner::MakePlan.
absl::StatusOr<v1::StepPlan> MakePlan(const v1::JobSpec& spec, const model::ModelConfig& config,
                                      const TrainingCase& run, const CaseOptions& options);

}  // namespace ringleader::bench
