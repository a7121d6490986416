// `ringctl plan` as a user runs it, with and without a coordinator.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "cli/testing/cli_fixture.h"

namespace ringleader::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST_F(CliTest, PlansForMachinesThatNeedNotExist) {
  coordinator_.Stop();
  const Result result = Run({"plan", Path("job.yaml"), "--nodes", "128", "--gpus", "8"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, StartsWith("tiny on 128 nodes × 8 GPUs: context 4 × data 256"));
  EXPECT_THAT(result.out, HasSubstr("layout                 striped"));
  EXPECT_THAT(result.out, HasSubstr("worker imbalance"));
  EXPECT_THAT(result.out, HasSubstr("exposed communication"));
  const Result own = Run({"plan", Path("job.yaml"), "-o", "json"});
  EXPECT_GT(nlohmann::json::parse(own.out)["prediction"]["step_seconds"], 0);
  const Result dense = Run({"plan", Path("job.yaml"), "--density", "0.37", "-o", "json"});
  EXPECT_NEAR(nlohmann::json::parse(dense.out)["prediction"]["density"].get<double>(), 0.37, 1e-6);
  EXPECT_EQ(Run({"plan", Path("job.yaml"), "--density", "1.5"}).code, kUsage);
  const Result documents = Run({"plan", Path("job.yaml"), "--documents", "8192,64"});
  EXPECT_EQ(documents.code, kUsage);
  EXPECT_THAT(documents.err, HasSubstr("--documents: goes with data.document_mask: true"));
  const Result by_documents =
      Run({"plan", Path("job.yaml"), "--documents", "300,40", "--set", "data.document_mask=true",
           "--set", "parallelism.layout=documents"});
  EXPECT_THAT(by_documents.out, HasSubstr("of a sequence's")) << by_documents.err;
  const Result small = Run({"plan", Path("job.yaml"), "--memory-gib", "0.001"});
  EXPECT_EQ(small.code, kUsage);
  EXPECT_THAT(small.err, HasSubstr("the model does not fit"));
  const std::vector<std::string> on_host = {"plan", Path("job.yaml"), "--gpus",
                                            "8",    "--set",          "resources.offload=host"};
  EXPECT_THAT(Run(on_host).out, HasSubstr("wait in host memory (resources.offload)"));
  std::vector<std::string> too_small = on_host;
  too_small.insert(too_small.end(), {"--host-memory-gib", "0.000001"});
  EXPECT_THAT(Run(too_small).err, HasSubstr("its share of that is 0.00 GiB"));
}

TEST_F(CliTest, PlansGoByWhatWasMeasuredAndSayHowFarOffTheyAre) {
  const auto plan = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"plan", Path("job.yaml"), "-o", "json"});
    return Run(more);
  };
  const auto seconds = [](const Result& result) {
    return nlohmann::json::parse(result.out)["prediction"]["step_seconds"].get<double>();
  };
  const double usual = seconds(plan({}));
  const std::string slow =
      R"({"machine": {"device": "slow"}, "bytes_per_second": 1e6, "latency_seconds": 1e-5})";
  Write("measured", R"({"tables": [], "links": [)" + slow + "]}");
  const Result measured = plan({"--measured", Path("measured")});
  EXPECT_EQ(measured.code, 0) << measured.err;
  EXPECT_GT(seconds(measured), 1.5 * usual);
  EXPECT_THAT(measured.err,
              HasSubstr("slow as measured: attention of the job's shape was not, usual "
                        "speed; links inside a node at 0.001 GB/s"));
  EXPECT_LT(seconds(plan({"--measured", Path("measured"), "--intra-node-gbytes", "1e6"})), usual)
      << "what is given is not as measured";
  Write("measured",
        R"({"links": [{"machine": {"device": "other"}, "bytes_per_second": 1e12}, )" + slow + "]}");
  EXPECT_THAT(plan({"--measured", Path("measured")}).err,
              HasSubstr("name one of its devices by --device: \"other\", \"slow\""));
  EXPECT_EQ(plan({"--measured", Path("measured"), "--device", "third"}).code, kUsage);
  EXPECT_EQ(seconds(plan({"--measured", Path("measured"), "--device", "slow"})), seconds(measured));
  for (const char* speed : {"-5", "0", "\"NaN\"", "\"Infinity\""}) {
    Write("measured",
          absl::StrCat(R"({"links": [{"machine": {"device": "x"}, "bytes_per_second": )", speed,
                       R"(, "latency_seconds": 1e-5}]})"));
    const Result impossible = plan({"--measured", Path("measured")});
    EXPECT_NE(impossible.code, 0) << speed;
    EXPECT_THAT(impossible.err, AllOf(HasSubstr(Path("measured")), HasSubstr("no link has")));
  }
  Write("measured", "{\"tables\": []}\n{\"tables\": []}\n");
  const std::string no_json = plan({"--measured", Path("measured")}).err;
  EXPECT_THAT(no_json, HasSubstr("is not what `ringctl latency -o json` prints"));
  EXPECT_EQ(std::ranges::count(no_json, '\n'), 1) << no_json;
  EXPECT_LE(LongestLine(Run({"plan", Path("job.yaml")}, 80).out), 80);
  Write("measured", "{}");
  EXPECT_THAT(plan({"--measured", Path("measured")}).err, HasSubstr("nothing had been measured"));
  Write("measured", "tokens,density");
  EXPECT_THAT(plan({"--measured", Path("measured")}).err, HasSubstr("`ringctl latency -o json`"));

  // The first of four warms up.
  Write("steps", R"({"step_seconds": 10}
{"step_seconds": 2}
{"step_seconds": 4}
{"step_seconds": 3}
)");
  EXPECT_THAT(plan({"--steps", Path("steps")}).err,
              HasSubstr("3 measured steps took 3 s (median): predicted "));
  Write("steps", "{}\n");
  EXPECT_THAT(plan({"--steps", Path("steps")}).err, HasSubstr("steps:1: is no step"));
  Write("steps", "");
  EXPECT_THAT(plan({"--steps", Path("steps")}).err, HasSubstr("holds no step"));
}

// Before, a length was advised under which the same heads were refused.
TEST_F(CliTest, PlansLookAtTheModelsHeadsFirst) {
  Write("config.json", R"({"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 1024,
      "intermediate_size": 688, "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 320})");
  for (const char* command : {"plan", "validate", "submit"}) {
    const Result result = Run({command, Path("job.yaml"), "--set", "parallelism.heads=3", "--set",
                               "parallelism.context=6", "--set", "resources.trainers=6"});
    EXPECT_EQ(result.code, kUsage) << command;
    EXPECT_THAT(result.err, HasSubstr("parallelism.heads: 3 trainers cannot share out 16 heads "
                                      "over 2 KV heads evenly; give one of 1, 2, 4, 8, 16\n"))
        << command;
    EXPECT_THAT(result.err, Not(HasSubstr("data.sequence_length"))) << command;
  }
}

TEST_F(CliTest, DensityIsANumber) {
  for (const char* density : {"nan", "NaN", "-nan", "inf", "0", "1.5", "x"}) {
    const Result result = Run({"plan", Path("job.yaml"), "--density", density});
    EXPECT_EQ(result.code, kUsage) << density;
    EXPECT_THAT(result.err, HasSubstr("give a number from 0.000001 to 1")) << density;
  }
}

TEST_F(CliTest, PlansAskTheCoordinatorForWhatItMeasured) {
  const auto plan = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"plan", Path("job.yaml"), "-o", "json"});
    return Run(more);
  };
  const auto seconds = [](const Result& result) {
    return nlohmann::json::parse(result.out)["prediction"]["step_seconds"].get<double>();
  };
  const Result none = plan({"--from-coordinator"});
  EXPECT_EQ(none.code, kUsage);
  EXPECT_THAT(none.err, HasSubstr("the coordinator's latency table: nothing had been measured"));
  const double usual = seconds(plan({}));
  const auto add_link = [&](const char* device) {
    v1::LinkSpeed& link = *coordinator_.measured.add_links();
    link.mutable_machine()->set_device(device);
    link.set_bytes_per_second(1e6);
    link.set_latency_seconds(1e-5);
  };
  add_link("slow");
  const Result asked = plan({"--from-coordinator"});
  EXPECT_GT(seconds(asked), 1.5 * usual);
  EXPECT_THAT(asked.err, HasSubstr("links inside a node at 0.001 GB/s"));
  EXPECT_EQ(seconds(plan({})), usual) << "nobody asked";
  Write("measured", "{}");
  EXPECT_EQ(plan({"--from-coordinator", "--measured", Path("measured")}).code, kUsage);
  add_link("other");
  EXPECT_THAT(plan({"--from-coordinator"}).err,
              HasSubstr("table: name one of its devices by --device: \"other\", \"slow\""));
  EXPECT_EQ(seconds(plan({"--from-coordinator", "--device", "slow"})), seconds(asked));
  coordinator_.Stop();
  EXPECT_EQ(plan({"--from-coordinator"}).code, kUnavailable);
  EXPECT_EQ(plan({}).code, 0);
}

TEST_F(CliTest, PlansGoByTheReportsOfARunningJob) {
  const auto prediction = [](const Result& result) {
    EXPECT_EQ(result.code, 0) << result.err;
    nlohmann::json all = nlohmann::json::parse(result.out)["prediction"];
    all.erase("probed_recall");  // was measured
    return all;
  };
  ASSERT_EQ(Run({"submit", Path("job.yaml")}).code, 0);
  const v1::JobSpec spec = coordinator_.jobs["jobs/tiny"].spec();
  ScriptRun("tiny", v1::Job::SUCCEEDED);
  for (v1::WatchJobResponse& response : coordinator_.watch) {
    if (response.has_job()) *response.mutable_job()->mutable_spec() = spec;
    for (v1::StepReport& step : *response.mutable_steps()) {
      step.mutable_layers(0)->set_density(0.5);
      step.mutable_layers(1)->set_density(0.25);
    }
  }
  v1::Job& job = coordinator_.jobs["jobs/tiny"];
  *job.mutable_spec() = spec;
  job.add_attempts()->add_placements();
  job.mutable_attempts(0)->add_placements();
  *coordinator_.watch.rbegin()->mutable_job()->mutable_attempts() = job.attempts();

  const Result own = Run({"plan", "--job", "tiny", "-o", "json"});
  const Result given =
      Run({"plan", Path("job.yaml"), "--nodes", "2", "--density", "0.375", "-o", "json"});
  EXPECT_EQ(prediction(own), prediction(given)) << "the mean of its layers, on the nodes it ran on";
  EXPECT_NE(prediction(own), prediction(Run({"plan", Path("job.yaml"), "-o", "json"})));
  EXPECT_THAT(own.err, HasSubstr("tiny as its newest reports have it: sparse layers visit 37.5 %"));
  EXPECT_THAT(own.err, HasSubstr("2 measured steps took 2 s (median): predicted "));
  const nlohmann::json probed = nlohmann::json::parse(own.out)["prediction"]["probed_recall"];
  EXPECT_EQ(probed, (nlohmann::json{{"step", "3"},
                                    {"layers", {{{"layer", 1}, {"by_head", {1.0, 0.25}}}}}}));
  EXPECT_THAT(Run({"plan", "--job", "tiny"}).out,
              HasSubstr("attention mass kept, by the probe of step 3\n"
                        "LAYER  RECALL  OF HEADS, IN PERCENT\n"
                        "1      62.5 %  100 25\n"));
  // Another file, or fields of the job's own, at its density.
  EXPECT_EQ(prediction(Run({"plan", Path("job.yaml"), "--job", "tiny", "-o", "json"})),
            prediction(own));
  const Result longer =
      Run({"plan", "--job", "tiny", "--set", "data.sequence_length=4096", "-o", "json"});
  EXPECT_EQ(prediction(longer),
            prediction(Run({"plan", Path("job.yaml"), "--nodes", "2", "--density", "0.375", "--set",
                            "data.sequence_length=4096", "-o", "json"})));
  EXPECT_THAT(longer.err, Not(HasSubstr("measured steps"))) << "they were of another job";
  EXPECT_EQ(
      prediction(Run({"plan", "--job", "tiny", "--density", "0.1", "-o", "json"})),
      prediction(Run({"plan", Path("job.yaml"), "--nodes", "2", "--density", "0.1", "-o", "json"})))
      << "what is given is not as reported";
  EXPECT_THAT(Run({"plan", "--job", "tiny", "--set", "attention.pattern=dense"}).err,
              HasSubstr("--job tiny: its attention.pattern is another one"));
  EXPECT_THAT(Run({"plan", "--job", "tiny", "--set", "training.stepz=1"}).err,
              HasSubstr("training.stepz"));
  EXPECT_EQ(Run({"plan", "--job", "nobody"}).code, kNotFound);
  const Result nothing = Run({"plan"});
  EXPECT_EQ(nothing.code, kUsage);
  EXPECT_THAT(nothing.err, HasSubstr("name a job file, or by --job a job of the coordinator"));
}

// A device has no end, and a pipe may have no writer.
TEST_F(CliTest, WhatIsNoFileIsNamedAndNotReadForEver) {
  const std::vector<std::string> samples = {
      "plan",  Path("job.yaml"),        "--set", "data.batching=samples",
      "--set", "parallelism.context=1", "--set", "parallelism.data=4"};
  const auto with = [&](const std::string& flag, const std::string& path) {
    std::vector<std::string> command = samples;
    command.insert(command.end(), {flag, path});
    return Run(command);
  };
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  for (const char* flag : {"--measured", "--lengths", "--steps", "--token-file", "--config"}) {
    const Result device = with(flag, "/dev/zero");
    EXPECT_EQ(device.code, kUsage) << flag;
    const std::string name = flag == std::string("--config") ? "configuration file" : flag;
    EXPECT_THAT(device.err, HasSubstr(name + ": /dev/zero is a device; a file is expected"));
    const Result pipe = with(flag, Path("pipe"));
    EXPECT_EQ(pipe.code, kUsage) << flag;
    EXPECT_THAT(pipe.err, HasSubstr(Path("pipe")));
    Write("huge", "");
    std::filesystem::resize_file(folder_ / "huge", uint64_t{1} << 40);
    EXPECT_THAT(with(flag, Path("huge")).err, HasSubstr("has 1099511627776 bytes; at most "));
  }
  EXPECT_THAT(Run({"plan", "/dev/zero"}).err,
              HasSubstr("job file: /dev/zero is a device; a file is expected"));
  EXPECT_EQ(Run({"plan", Path("none.yaml")}).code, kNotFound);
}

TEST_F(CliTest, PlansOfSamplesGoByTheirLengths) {
  const auto plan = [&](std::vector<std::string> more) {
    std::vector<std::string> command = {
        "plan",  Path("job.yaml"),        "--set", "data.batching=samples",
        "--set", "parallelism.context=1", "--set", "parallelism.data=4"};
    command.insert(command.end(), more.begin(), more.end());
    return Run(command);
  };
  const Result unknown = plan({"-o", "json"});
  EXPECT_EQ(unknown.code, 0) << unknown.err;
  EXPECT_THAT(unknown.err, HasSubstr("--lengths FILE says how long they are"));
  Write("lengths", "1024\n\n 16384 \n2000\n1500\n");
  const Result known = plan({"--lengths", Path("lengths"), "-o", "json"});
  EXPECT_EQ(known.code, 0) << known.err;
  EXPECT_THAT(known.err, HasSubstr("predicted from 4 lengths"));
  const auto seconds = [](const Result& result) {
    return nlohmann::json::parse(result.out)["prediction"]["step_seconds"].get<double>();
  };
  EXPECT_LT(seconds(known), 0.9 * seconds(unknown));
  EXPECT_THAT(plan({"--lengths", Path("lengths")}).out, HasSubstr("mean of 16 steps"));
  Write("lengths", "1024\nlong\n");
  EXPECT_THAT(plan({"--lengths", Path("lengths")}).err, HasSubstr("lengths:2: a number of tokens"));
  Write("lengths", "20000\n");
  EXPECT_THAT(plan({"--lengths", Path("lengths")}).err,
              HasSubstr("length 1 of the samples is 20000"));
  EXPECT_THAT(Run({"plan", Path("job.yaml"), "--lengths", Path("lengths")}).err,
              HasSubstr("goes with data.batching: samples"));

  // Data that can be read says it itself.
  std::filesystem::create_directory(folder_ / "texts");
  Write("texts/a", std::string(9000, 'a'));
  Write("texts/b", std::string(500, 'b'));
  ASSERT_EQ(Run({"data", "pack", "--input", Path("texts"), "--output", Path("documents"),
                 "--eval-share", "0"})
                .code,
            0);
  const Result packed = plan({"--set", "data.train=" + Path("documents/train"), "-o", "json"});
  EXPECT_EQ(packed.code, 0) << packed.err;
  EXPECT_THAT(packed.err, HasSubstr("predicted from 2 lengths of data.train"));
  EXPECT_LT(seconds(packed), 0.9 * seconds(unknown));
}

}  // namespace
}  // namespace ringleader::cli
