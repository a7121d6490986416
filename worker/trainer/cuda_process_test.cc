// Whole attempts on GPUs: what trains is what the CPU trains, on any number of GPUs, and goes on
// after stops and faults.
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/trainer/testing/cuda_attempt_test.h"

namespace ringleader::trainer {
namespace {

using testing::AllReachedStep;
using testing::Gpus;
using ::testing::HasSubstr;
using testing::kBfloat16Noise;
using testing::Losses;
using testing::RankLog;
using testing::RanksPerGpu;

class CudaProcessTest : public testing::CudaAttemptTest {
 protected:
  // 40 steps, of which the first few on a ring of `before` ranks and the rest on `after`, have the
  // losses of a job that nobody stops: to the last bit on as many ranks. On others sums are in
  // another order: the first step after the stop, of the same weights, differs by its rounding
  // alone, and the learning rate is so low that no later one makes much of it.
  void ExpectToGoOn(int before, int after) {
    v1::JobSpec spec = GpuJob(before);
    spec.mutable_training()->set_steps(40);
    spec.mutable_training()->set_learning_rate(3e-4);
    spec.mutable_training()->set_deterministic(true);
    const std::vector<double> undisturbed = Losses(RunToEnd(spec)[0]);
    EXPECT_LT(undisturbed.back(), 0.9 * undisturbed.front());
    UseCheckpoints(&spec, Path("stopped"));
    const std::vector<RankLog> stopped = StopEarly(spec);
    std::vector<double> losses = Losses(stopped[0]);
    const size_t steps_before = losses.size();
    ASSERT_LT(steps_before, undisturbed.size());
    for (size_t i = 0; i < steps_before; ++i) EXPECT_EQ(losses[i], undisturbed[i]) << i;
    spec.mutable_parallelism()->set_context(after);
    spec.mutable_resources()->set_trainers(after);
    const RankLog resumed = RunToEnd(spec)[0];
    EXPECT_THAT(Output(), HasSubstr("resuming from"));
    for (const double loss : Losses(resumed)) losses.push_back(loss);
    ASSERT_EQ(losses.size(), undisturbed.size());
    if (before == after) {
      EXPECT_EQ(losses, undisturbed);
    } else {
      EXPECT_NEAR(losses[steps_before], undisturbed[steps_before],
                  1e-3 * undisturbed[steps_before]);
      ExpectNear(losses, undisturbed);
    }
  }
};

TEST_F(CudaProcessTest, TrainsAsTheCpuDoes) {
  NEED_GPUS(1);
  v1::JobSpec spec = GpuJob(1);
  const RankLog gpu = RunToEnd(spec)[0];
  EXPECT_LT(gpu.steps.back().loss(), gpu.steps.front().loss());
  EXPECT_GT(gpu.steps.back().phases().attention_backward(), 0.0);
  EXPECT_GT(gpu.steps.back().phases().linear(), 0.0);
  EXPECT_GT(gpu.steps.back().peak_memory_bytes(), 1u << 20);
  EXPECT_LT(gpu.evals.back().loss(), gpu.evals.front().loss());
  EXPECT_TRUE(std::filesystem::exists(gpu.model_path + "/model.safetensors"));

  spec.mutable_resources()->set_engine(v1::ResourcesSpec::CPU);
  UseCheckpoints(&spec, Path("cpu"));
  const RankLog cpu = RunToEnd(spec)[0];
  ExpectNear(Losses(gpu), Losses(cpu));
  EXPECT_NEAR(gpu.evals.back().loss(), cpu.evals.back().loss(),
              kBfloat16Noise * cpu.evals.back().loss());
}

TEST_F(CudaProcessTest, KeepsPackedDocumentsApartAsTheCpuDoes) {
  NEED_GPUS(1);
  v1::JobSpec spec = GpuJob(1);
  spec.mutable_data()->set_document_mask(true);
  const RankLog gpu = RunToEnd(spec)[0];
  spec.mutable_resources()->set_engine(v1::ResourcesSpec::CPU);
  UseCheckpoints(&spec, Path("cpu"));
  ExpectNear(Losses(gpu), Losses(RunToEnd(spec)[0]));
}

// Two groups, with whatever numbers of micro-batches they get, train the samples that one GPU and
// the CPU train; dense attention has several in a micro-batch, vertical-slash one.
TEST_F(CudaProcessTest, SamplesInAnyDealingTrainWhatTheCpuTrains) {
  NEED_GPUS(1);
  for (const auto pattern : {v1::AttentionSpec::DENSE, v1::AttentionSpec::VERTICAL_SLASH}) {
    std::vector<double> expected;
    for (const int gpus : {0, 1, 2}) {
      if (gpus > Gpus() * RanksPerGpu()) continue;
      v1::JobSpec spec = GpuJob(1, std::max(1, gpus));
      if (gpus == 0) spec.mutable_resources()->set_engine(v1::ResourcesSpec::CPU);
      spec.mutable_data()->set_batching(v1::DataSpec::SAMPLES);
      spec.mutable_training()->set_global_batch(6);
      spec.mutable_attention()->set_pattern(pattern);
      if (pattern == v1::AttentionSpec::DENSE) spec.mutable_attention()->clear_sink_tokens();
      UseCheckpoints(&spec, Path(std::to_string(pattern) + "-" + std::to_string(gpus)));
      const RankLog log = RunToEnd(spec)[0];
      EXPECT_EQ(log.steps.back().samples(), 6u);
      if (gpus == 0) expected = Losses(log);
      ExpectNear(Losses(log), expected);
    }
  }
}

TEST_F(CudaProcessTest, RecomputePoliciesTrainTheSameModel) {
  NEED_GPUS(1);
  v1::JobSpec spec = GpuJob(1);
  spec.mutable_resources()->set_recompute(v1::ResourcesSpec::NONE);
  const std::vector<double> expected = Losses(RunToEnd(spec)[0]);
  for (const auto recompute : {v1::ResourcesSpec::ATTENTION_ONLY, v1::ResourcesSpec::FULL}) {
    spec.mutable_resources()->set_recompute(recompute);
    UseCheckpoints(&spec, Path(v1::ResourcesSpec::Recompute_Name(recompute)));
    ExpectNear(Losses(RunToEnd(spec)[0]), expected);
  }
}

TEST_F(CudaProcessTest, KeptActivationsMayWaitInHostMemory) {
  NEED_GPUS(1);
  v1::JobSpec spec = GpuJob(1);
  spec.mutable_training()->set_deterministic(true);
  spec.mutable_training()->set_global_batch(2);
  const auto run = [&](v1::ResourcesSpec::Recompute recompute, v1::ResourcesSpec::Offload offload) {
    spec.mutable_resources()->set_recompute(recompute);
    spec.mutable_resources()->set_offload(offload);
    UseCheckpoints(&spec, Path(v1::ResourcesSpec::Recompute_Name(recompute) +
                               v1::ResourcesSpec::Offload_Name(offload)));
    return RunToEnd(spec)[0];
  };
  for (const auto recompute : {v1::ResourcesSpec::FULL, v1::ResourcesSpec::NONE}) {
    const RankLog kept = run(recompute, v1::ResourcesSpec::OFFLOAD_NONE);
    const RankLog moved = run(recompute, v1::ResourcesSpec::OFFLOAD_HOST);
    EXPECT_EQ(Losses(moved), Losses(kept)) << "to the last bit";
    EXPECT_EQ(kept.steps.back().phases().exposed_offload(), 0.0);
    // Two layers have one slot: nothing hides the copies.
    EXPECT_GT(moved.steps.back().phases().exposed_offload(), 0.0);
  }
}

TEST_F(CudaProcessTest, Fp8LearnsAsBf16AndRepeatsToTheLastBit) {
  NEED_GPUS(1);
  v1::JobSpec spec = GpuJob(1);
  spec.mutable_training()->set_deterministic(true);
  const std::vector<double> bf16 = Losses(RunToEnd(spec)[0]);
  spec.mutable_training()->set_precision(v1::TrainingSpec::FP8_ALL_LAYERS);
  std::vector<std::vector<double>> runs;
  for (const int global_batch : {1, 1, 2}) {
    spec.mutable_training()->set_global_batch(global_batch);
    UseCheckpoints(&spec, Path("fp8-" + std::to_string(runs.size())));
    runs.push_back(Losses(RunToEnd(spec)[0]));
  }
  EXPECT_EQ(runs[0], runs[1]);
  EXPECT_LT(runs[2].back(), runs[2].front()) << "with casts that two micro-batches share";
  spec.mutable_training()->set_global_batch(GpuJob(1).training().global_batch());
  UseCheckpoints(&spec, Path("fp8"));
  const std::vector<double> fp8 = Losses(RunToEnd(spec)[0]);
  ASSERT_EQ(fp8.size(), bf16.size());
  for (size_t i = 0; i < fp8.size(); ++i) EXPECT_NEAR(fp8[i], bf16[i], 0.01 * bf16[i]) << i;
  EXPECT_NE(fp8, bf16) << "nothing was cast";
}

TEST_F(CudaProcessTest, ResumesWhereItStopped) {
  NEED_GPUS(1);
  ExpectToGoOn(1, 1);
}

TEST_F(CudaProcessTest, AnyNumberOfGpusTrainsTheSameModel) {
  NEED_GPUS(2);
  v1::JobSpec spec = GpuJob(1);
  const std::vector<double> expected = Losses(RunToEnd(spec)[0]);
  std::vector<std::pair<int, int>> shapes = {{2, 1}, {1, 2}};  // context, data
  if (Gpus() * RanksPerGpu() >= 4) shapes.insert(shapes.end(), {{4, 1}, {2, 2}});
  for (const auto& [context, data] : shapes) {
    SCOPED_TRACE(std::to_string(context) + " x " + std::to_string(data));
    spec = GpuJob(context, data);
    UseCheckpoints(&spec, Path(std::to_string(context) + "x" + std::to_string(data)));
    ExpectNear(Losses(RunToEnd(spec)[0]), expected);
  }
}

// What was selected covers everything: only the way to it differs.
TEST_F(CudaProcessTest, SparseAttentionAtFullDensityTrainsAsDenseDoes) {
  NEED_GPUS(1);
  for (const int context : {1, 2}) {
    if (context > Gpus()) continue;
    SCOPED_TRACE(std::to_string(context) + " GPUs");
    v1::JobSpec spec = GpuJob(context);
    spec.mutable_training()->set_steps(50);
    spec.mutable_checkpoint()->set_every_steps(0);
    spec.mutable_attention()->set_select(v1::AttentionSpec::TOP_K);
    spec.mutable_attention()->set_max_slashes(2048 / 128);
    UseCheckpoints(&spec, Path("sparse-" + std::to_string(context)));
    const RankLog sparse = RunToEnd(spec)[0];
    ASSERT_EQ(sparse.steps.size(), 50u);
    for (const v1::LayerReport& layer : sparse.steps.back().layers()) {
      EXPECT_DOUBLE_EQ(layer.density(), 1.0);
    }
    spec.mutable_attention()->Clear();
    spec.mutable_attention()->set_pattern(v1::AttentionSpec::DENSE);
    spec.mutable_attention()->set_tile(128);
    UseCheckpoints(&spec, Path("dense-" + std::to_string(context)));
    const std::vector<double> dense = Losses(RunToEnd(spec)[0]);
    EXPECT_LT(dense.back(), 0.5 * dense.front());  // something was learnt on the way
    ExpectNear(Losses(sparse), dense);
  }
}

TEST_F(CudaProcessTest, ACheckpointOfTwoGpusGoesOnOnOne) {
  NEED_GPUS(2);
  ExpectToGoOn(2, 1);
}

TEST_F(CudaProcessTest, ACheckpointOfFourGpusGoesOnOnTwo) {
  NEED_GPUS(4);
  ExpectToGoOn(4, 2);
}

// A ring within each host and one between them.
TEST_F(CudaProcessTest, AHierarchicalRingTrainsTheSameModel) {
  NEED_GPUS(4);
  const v1::JobSpec one = GpuJob(1);
  const std::vector<double> expected = Losses(RunToEnd(one)[0]);
  v1::JobSpec spec = GpuJob(4);
  UseCheckpoints(&spec, Path("hierarchical"));
  v1::StepPlan plan = testing::TinyPlan(spec);
  plan.mutable_ring()->set_kind(v1::ParallelismSpec::HIERARCHICAL);
  plan.mutable_ring()->set_inner(2);
  plan.mutable_ring()->set_outer(2);
  const std::vector<RankLog> logs = Start(spec, plan)->Finish();
  EXPECT_THAT(Output(), HasSubstr("2 inner x 2 outer"));
  ExpectNear(Losses(logs[0]), expected);
}

TEST_F(CudaProcessTest, TheSameBitsTwiceWhereAskedFor) {
  NEED_GPUS(1);
  for (const auto pattern : {v1::AttentionSpec::VERTICAL_SLASH, v1::AttentionSpec::BLOCK_TOPK,
                             v1::AttentionSpec::MOBA, v1::AttentionSpec::XATTENTION}) {
    for (const int context : {1, 2}) {
      if (context > Gpus()) continue;
      v1::JobSpec spec = GpuJob(context);
      SCOPED_TRACE(v1::AttentionSpec::Pattern_Name(pattern) + " on " + std::to_string(context));
      if (pattern != v1::AttentionSpec::VERTICAL_SLASH) {
        spec.mutable_attention()->Clear();
        spec.mutable_attention()->set_pattern(pattern);
        spec.mutable_attention()->set_tile(128);
      }
      if (pattern == v1::AttentionSpec::BLOCK_TOPK || pattern == v1::AttentionSpec::MOBA) {
        spec.mutable_attention()->set_block_size(256);
        spec.mutable_attention()->set_topk_blocks(2);
      }
      spec.mutable_training()->set_steps(20);
      spec.mutable_training()->set_deterministic(true);
      spec.mutable_checkpoint()->set_every_steps(0);
      std::vector<RankLog> runs;
      for (const char* name : {"once", "twice"}) {
        UseCheckpoints(&spec, Path(std::string(name) + v1::AttentionSpec::Pattern_Name(pattern) +
                                   std::to_string(context)));
        runs.push_back(RunToEnd(spec)[0]);
      }
      EXPECT_EQ(Losses(runs[0]), Losses(runs[1]));
      ASSERT_EQ(runs[0].steps.size(), runs[1].steps.size());
      for (size_t i = 0; i < runs[0].steps.size(); ++i) {
        EXPECT_EQ(runs[0].steps[i].gradient_norm(), runs[1].steps[i].gradient_norm());
      }
      EXPECT_EQ(runs[0].evals.back().loss(), runs[1].evals.back().loss());
    }
  }
}

TEST_F(CudaProcessTest, AKilledRankTakesTheOthersDownAsCollateral) {
  NEED_GPUS(2);
  v1::JobSpec spec = GpuJob(2);
  spec.mutable_training()->set_steps(100'000);
  spec.mutable_checkpoint()->set_every_steps(0);
  auto agent = Start(spec);
  ASSERT_TRUE(agent->WaitFor([](const std::vector<RankLog>& logs) {
    return AllReachedStep(logs, 2);
  })) << Output();
  kill(agent->pid(1), SIGKILL);
  const std::vector<RankLog> logs = agent->Finish();
  ASSERT_TRUE(logs[0].result.has_value()) << Output();
  EXPECT_TRUE(logs[0].result->collateral());
  EXPECT_THAT(logs[0].result->message(), HasSubstr("rank 1 is gone"));
}

TEST_F(CudaProcessTest, AModelThatDoesNotFitIsRefusedWithTheArithmetic) {
  NEED_GPUS(1);
  v1::JobSpec spec = GpuJob(1);
  std::ofstream(Path("config.json")) << R"({"model_type": "qwen2", "vocab_size": 264,
      "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
      "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 4096,
      "rms_norm_eps": 1e-6, "tie_word_embeddings": true})";
  const v1::TrainerResult result = Failure(spec);
  EXPECT_THAT(result.message(), HasSubstr("GiB"));
  EXPECT_FALSE(result.retryable());
}

}  // namespace
}  // namespace ringleader::trainer
