#include "bench/training_case.h"

#include <algorithm>
#include <filesystem>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "coordinator/planner/candidates.h"
#include "coordinator/planner/planner.h"
#include "jobspec/jobspec.h"
#include "patterns/pattern.h"

namespace ringleader::bench {
namespace {

// The pattern `name` at `density` of what `tokens` let it see; 0: as it is by default.
absl::Status SetPattern(const std::string& name, double density, int64_t tokens,
                        v1::AttentionSpec* attention) {
  v1::AttentionSpec::Pattern pattern = v1::AttentionSpec::PATTERN_UNSPECIFIED;
  v1::AttentionSpec::Pattern_Parse(absl::AsciiStrToUpper(name), &pattern);
  attention->set_pattern(pattern);
  if (density == 0) {
    v1::JobSpec job;
    job.mutable_attention()->set_pattern(pattern);
    job.mutable_data()->set_sequence_length(static_cast<uint64_t>(tokens));
    jobspec::ApplyDefaults(&job);
    *attention = job.attention();
    attention->set_probe_every(0);
    return absl::OkStatus();
  }
  // Queries from the place on where the share begins see as many keys each.
  const double seen = patterns::ShareOfLength(density) * static_cast<double>(tokens);
  switch (pattern) {
    case v1::AttentionSpec::SLIDING_WINDOW:
      attention->set_window(std::max(1u, static_cast<uint32_t>(seen)));
      return absl::OkStatus();
    case v1::AttentionSpec::BLOCK_TOPK:
      attention->set_block_size(128);
      attention->set_topk_blocks(std::max(1u, static_cast<uint32_t>(seen) / 128));
      return absl::OkStatus();
    case v1::AttentionSpec::VERTICAL_SLASH:
      attention->set_select(v1::AttentionSpec::TOP_K);
      break;
    case v1::AttentionSpec::XATTENTION:
      attention->set_threshold(1.0);
      break;
    case v1::AttentionSpec::KEY_GROUPS:
      attention->set_tile(64);
      break;
    case v1::AttentionSpec::FIXED_BLOCKS: {
      patterns::AttentionOptions options = {.pattern = patterns::Pattern::kFixedBlocks,
                                            .local_blocks = 8};
      patterns::DefinitionOf(options.pattern).set_density(&options, tokens, density);
      attention->set_local_blocks(static_cast<uint32_t>(options.local_blocks));
      attention->set_stride_blocks(static_cast<uint32_t>(options.stride_blocks));
      return absl::OkStatus();
    }
    case v1::AttentionSpec::MOBA:
    case v1::AttentionSpec::ADASPA:
      break;
    default:
      return absl::InvalidArgumentError(absl::StrCat("--mode ", name, " keeps no share"));
  }
  attention->set_density(density);
  return absl::OkStatus();
}

// What documents are predicted to take, as jobs get it on machines of which only links are known.
absl::Status SetWeights(v1::JobSpec spec, const model::ModelConfig& config,
                        const CaseOptions& options, v1::StepPlan* plan) {
  jobspec::ApplyDefaults(&spec);
  spec.mutable_parallelism()->set_layout(v1::ParallelismSpec::DOCUMENTS);
  planner::ClusterShape cluster =
      planner::TypicalCluster(spec.resources().engine(), options.nodes,
                              static_cast<int>(spec.resources().trainers()) / options.nodes);
  if (options.inter_node_gbytes > 0) {
    cluster.inter_node.bytes_per_second = 1e9 * options.inter_node_gbytes;
  }
  const planner::CostModel costs(spec, config, cluster);
  ASSIGN_OR_RETURN(const v1::StepPlan made, planner::MakePlan(spec, config, cluster, costs));
  *plan->mutable_sample_weights() = made.sample_weights();
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::JobSpec> MakeSpec(const CaseOptions& options, const TrainingCase& run,
                                     const std::string& folder) {
  if (run.gpus % run.heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--heads %d does not divide --gpus %d", run.heads, run.gpus));
  }
  v1::JobSpec spec;
  spec.set_name("bench");
  spec.mutable_model()->set_config(std::filesystem::absolute(options.config));
  spec.mutable_model()->set_init("random");
  spec.mutable_data()->set_train(folder + "/tokens/train");
  spec.mutable_data()->set_sequence_length(run.tokens);
  spec.mutable_data()->set_document_mask(!options.documents.empty());
  v1::AttentionSpec* attention = spec.mutable_attention();
  attention->set_tile(128);
  if (run.mode == "dense") {
    attention->set_pattern(v1::AttentionSpec::DENSE);
  } else if (run.mode != "sparse") {
    RETURN_IF_ERROR(SetPattern(run.mode, options.density, run.tokens, attention));
    if (attention->pattern() == v1::AttentionSpec::KEY_GROUPS) {
      attention->set_group_queries(options.group_queries);
      attention->set_group_heads(options.group_heads);
    }
  } else {
    attention->set_pattern(v1::AttentionSpec::VERTICAL_SLASH);
    attention->set_select(v1::AttentionSpec::TOP_K);
    attention->set_max_verticals(options.verticals);
    attention->set_max_slashes(
        static_cast<uint32_t>(static_cast<double>(run.tokens) / 128 * options.slash_share));
  }
  if (run.mode != "dense") attention->set_dense_below(run.dense_below);
  spec.mutable_parallelism()->set_context(run.gpus);
  spec.mutable_parallelism()->set_heads(run.heads);
  spec.mutable_parallelism()->set_data(1);
  v1::ParallelismSpec::KvGradients kv_gradients = v1::ParallelismSpec::KV_GRADIENTS_UNSPECIFIED;
  v1::ParallelismSpec::KvGradients_Parse(absl::AsciiStrToUpper(options.kv_gradients),
                                         &kv_gradients);
  spec.mutable_parallelism()->set_kv_gradients(kv_gradients);
  v1::TrainingSpec* training = spec.mutable_training();
  training->set_steps(options.steps + 1000);
  training->set_global_batch(1);
  training->set_learning_rate(1e-5);
  training->set_seed(1);
  v1::TrainingSpec::Precision precision = v1::TrainingSpec::PRECISION_UNSPECIFIED;
  v1::TrainingSpec::Precision_Parse(absl::AsciiStrToUpper(run.precision), &precision);
  training->set_precision(precision);
  spec.mutable_checkpoint()->set_directory(folder + "/checkpoints");
  spec.mutable_checkpoint()->set_every_steps(1000000);
  spec.mutable_resources()->set_trainers(run.gpus);
  spec.mutable_resources()->set_engine(options.engine == "cpu" ? v1::ResourcesSpec::CPU
                                                               : v1::ResourcesSpec::CUDA);
  v1::ResourcesSpec::Recompute recompute = v1::ResourcesSpec::RECOMPUTE_UNSPECIFIED;
  v1::ResourcesSpec::Recompute_Parse(absl::AsciiStrToUpper(options.recompute), &recompute);
  spec.mutable_resources()->set_recompute(recompute);
  v1::ResourcesSpec::Offload offload = v1::ResourcesSpec::OFFLOAD_UNSPECIFIED;
  v1::ResourcesSpec::Offload_Parse("OFFLOAD_" + absl::AsciiStrToUpper(options.offload), &offload);
  spec.mutable_resources()->set_offload(offload);
  return spec;
}

absl::StatusOr<v1::StepPlan> MakePlan(const v1::JobSpec& spec, const model::ModelConfig& config,
                                      const TrainingCase& run, const CaseOptions& options) {
  v1::StepPlan plan;
  plan.set_version(1);
  plan.set_effective_step(1);
  plan.set_layout(v1::ParallelismSpec::STRIPED);
  if (run.layout == "documents") {
    plan.set_layout(v1::ParallelismSpec::DOCUMENTS);
    RETURN_IF_ERROR(SetWeights(spec, config, options, &plan));
  }
  v1::JobSpec job = spec;
  jobspec::ApplyDefaults(&job);
  plan.set_stripe(planner::StripeOf(job));
  v1::RingShape* shape = plan.mutable_ring();
  shape->set_kind(v1::ParallelismSpec::FLAT);
  const int ranks = run.gpus / run.heads;
  shape->set_inner(ranks);
  shape->set_outer(1);
  if (run.ring == "all_gather") shape->set_kind(v1::ParallelismSpec::ALL_GATHER);
  if (run.ring == "hierarchical") {
    shape->set_kind(v1::ParallelismSpec::HIERARCHICAL);
    shape->set_inner(std::max(1, ranks / std::max(2, options.nodes)));
    shape->set_outer(ranks / shape->inner());
  }
  return plan;
}

}  // namespace ringleader::bench
