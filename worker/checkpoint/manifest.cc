#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "base/files.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "worker/checkpoint/checksummed_json.h"
#include "worker/checkpoint/format.h"

namespace ringleader::checkpoint {
namespace {

using Json = nlohmann::json;

constexpr char kFormatName[] = "ringleader-checkpoint";

std::string Hex(uint64_t checksum) {
  return absl::StrFormat("%016x", checksum);
}

Json LayoutJson(const model::ParameterLayout& layout) {
  Json parameters = Json::array();
  for (const model::ParameterSlot& slot : layout.slots) {
    parameters.push_back({{"name", slot.name}, {"shape", slot.shape}, {"offset", slot.offset}});
  }
  return {{"elements", layout.elements}, {"parameters", parameters}};
}

// What is the first thing that sets the saved model apart from this one.
std::string Difference(const Json& saved, const Json& own) {
  const Json &theirs = saved["parameters"], &ours = own["parameters"];
  for (size_t i = 0; i < std::min(theirs.size(), ours.size()); ++i) {
    if (theirs[i] != ours[i]) {
      return absl::StrFormat("its parameter %d is %s, the model's is %s", i, theirs[i].dump(),
                             ours[i].dump());
    }
  }
  return absl::StrFormat("it has %d parameters, the model %d", theirs.size(), ours.size());
}

// Throws as ParseBody does.
TrainingState ParseState(const Json& state) {
  std::string plan;
  if (!absl::Base64Unescape(state.value("plan", ""), &plan)) plan.clear();
  std::vector<patterns::LayerBudgets> head_budgets;
  for (const Json& layer : state.value("head_budgets", Json::array())) {
    head_budgets.push_back({.recall = layer.at("recall"), .halves = layer.at("halves")});
  }
  for (const char* count : {"step", "updates", "skipped_steps", "tokens", "data_position"}) {
    if (!state.at(count).is_number_unsigned()) {
      throw Json::type_error::create(302, std::string(count) + " is no whole number", &state);
    }
  }
  return {.step = state.at("step"),
          .updates = state.at("updates"),
          .skipped_steps = state.at("skipped_steps"),
          .tokens = state.at("tokens"),
          .data_position = state.at("data_position"),
          .seed = state.at("seed"),
          .job_digest = state.at("job_digest"),
          .plan = std::move(plan),
          .head_budgets = std::move(head_budgets)};
}

// Throws nlohmann's exceptions on members that are missing or of another type.
absl::StatusOr<CheckpointInfo> ParseBody(const Json& body, const model::ParameterLayout& layout,
                                         const std::string& source) {
  const Json own = LayoutJson(layout);
  if (body.at("layout") != own) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s: a checkpoint of another model (%s); give the job another checkpoint.directory", source,
        Difference(body.at("layout"), own)));
  }
  CheckpointInfo checkpoint;
  checkpoint.state = ParseState(body.at("state"));
  // The checksum has been checked; what follows guards against a writer's mistakes.
  for (const patterns::LayerBudgets& layer : checkpoint.state.head_budgets) {
    if (!patterns::IsSound(layer)) {
      return absl::DataLossError(source + ": its heads' budgets are damaged");
    }
  }
  int64_t end = 0;
  for (const Json& shard : body.at("shards")) {
    ShardFile file{
        .name = shard.at("file"), .begin = shard.at("begin"), .elements = shard.at("elements")};
    const std::string checksum = shard.at("xxh3_64");
    if (!absl::SimpleHexAtoi(checksum, &file.checksum) || file.begin != end || file.elements < 0 ||
        std::filesystem::path(file.name).filename() != file.name) {
      return absl::DataLossError(source + ": its list of shards is damaged");
    }
    end += file.elements;
    checkpoint.shards.push_back(std::move(file));
  }
  if (end != layout.elements) {
    return absl::DataLossError(source + ": its shards do not cover the model");
  }
  return checkpoint;
}

}  // namespace

std::string ManifestText(const CheckpointInfo& checkpoint, const model::ParameterLayout& layout) {
  const TrainingState& state = checkpoint.state;
  Json shards = Json::array();
  for (const ShardFile& shard : checkpoint.shards) {
    shards.push_back({{"file", shard.name},
                      {"begin", shard.begin},
                      {"elements", shard.elements},
                      {"xxh3_64", Hex(shard.checksum)}});
  }
  Json body = {{"layout", LayoutJson(layout)},
               {"shards", shards},
               {"state",
                {{"step", state.step},
                 {"updates", state.updates},
                 {"skipped_steps", state.skipped_steps},
                 {"tokens", state.tokens},
                 {"data_position", state.data_position},
                 {"seed", state.seed},
                 {"job_digest", state.job_digest}}}};
  if (!state.plan.empty()) body["state"]["plan"] = absl::Base64Escape(state.plan);
  for (const patterns::LayerBudgets& layer : state.head_budgets) {
    body["state"]["head_budgets"].push_back({{"recall", layer.recall}, {"halves", layer.halves}});
  }
  Json root = {{"format", kFormatName}, {"version", kFormatVersion}, {"body", body}};
  root[kChecksumKey] = ChecksumOf(root);
  return root.dump(1) + "\n";
}

absl::StatusOr<CheckpointInfo> ParseManifest(std::string_view text,
                                             const model::ParameterLayout& layout,
                                             const std::string& source) {
  const Json root = ParseJson(text);
  if (root.is_discarded() || !root.is_object() || root.value("format", Json()) != kFormatName ||
      !root.value("version", Json()).is_number_unsigned()) {
    return absl::DataLossError(source + ": damaged: not a checkpoint's manifest");
  }
  try {
    if (root.at(kChecksumKey) != ChecksumOf(root)) {
      return absl::DataLossError(source + ": damaged: it does not match its own checksum");
    }
    // The version is checked after the checksum: a flipped bit must not pass for a newer version.
    if (root["version"] > kFormatVersion) {
      return absl::FailedPreconditionError(
          absl::StrFormat("%s: format version %d; this program reads up to %d: use a newer one",
                          source, root["version"].get<uint64_t>(), kFormatVersion));
    }
    return ParseBody(root.at("body"), layout, source);
  } catch (const Json::exception& error) {
    return absl::DataLossError(absl::StrFormat("%s: damaged: %s", source, error.what()));
  }
}

std::string CheckpointName(uint64_t step, uint64_t generation) {
  return generation == 0 ? absl::StrFormat("step-%010d", step)
                         : absl::StrFormat("step-%010d.%d", step, generation);
}

bool ParseCheckpointName(std::string_view name, ParsedName& parsed) {
  const size_t dot = name.find('.');
  const std::string_view stem = name.substr(0, dot);
  if (!stem.starts_with("step-")) return false;
  parsed = {};
  if (!absl::SimpleAtoi(std::string(stem.substr(5)), &parsed.step)) return false;
  if (dot != std::string_view::npos &&
      !absl::SimpleAtoi(std::string(name.substr(dot + 1)), &parsed.generation)) {
    return false;
  }
  // One spelling a checkpoint: step-7 or step-0000000007.01 are someone else's folders.
  return name == CheckpointName(parsed.step, parsed.generation);
}

absl::StatusOr<std::vector<std::string>> ListCheckpoints(const std::string& directory) {
  std::vector<std::pair<ParsedName, std::string>> found;
  std::error_code error;
  std::filesystem::directory_iterator it(directory, error), end;
  // The first attempt of a job finds no directory yet.
  if (error == std::errc::no_such_file_or_directory) return std::vector<std::string>();
  for (; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename();
    ParsedName parsed;
    if (ParseCheckpointName(name, parsed)) found.emplace_back(parsed, name);
  }
  if (error) {
    return FileError(error.value(), absl::StrFormat("list checkpoint.directory %s", directory));
  }
  std::sort(found.rbegin(), found.rend());
  std::vector<std::string> names;
  names.reserve(found.size());
  for (auto& [parsed, name] : found) names.push_back(std::move(name));
  return names;
}

}  // namespace ringleader::checkpoint
