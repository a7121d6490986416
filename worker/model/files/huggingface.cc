#include "worker/model/files/huggingface.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/files.h"
#include "base/json.h"
#include "base/process/progress.h"
#include "base/status_macros.h"
#include "worker/model/files/safetensors.h"

namespace ringleader::model {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr char kSingleFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";
constexpr size_t kMaxIndexBytes = size_t{64} << 20;

// tensor name -> file name, from an index; file names must stay inside the folder.
absl::StatusOr<std::map<std::string, std::string>> ReadIndex(const fs::path& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadRegularFile(path, kMaxIndexBytes));
  const Json root = ParseJson(text);
  if (root.is_discarded() || !root.is_object() || !root.contains("weight_map") ||
      !root["weight_map"].is_object()) {
    return absl::DataLossError(path.string() + ": not a JSON object with a \"weight_map\"");
  }
  std::map<std::string, std::string> files;
  for (const auto& [tensor, value] : root["weight_map"].items()) {
    if (!value.is_string() ||
        value.get<std::string>() != fs::path(value.get<std::string>()).filename()) {
      return absl::DataLossError(absl::StrFormat(
          "%s: tensor %s must name a file of the same folder", path.string(), tensor));
    }
    files[tensor] = value.get<std::string>();
  }
  return files;
}

constexpr char kEmbedding[] = "model.embed_tokens.weight";
constexpr char kHead[] = "lm_head.weight";

// Tensors that some exporters add and that carry nothing of their own.
bool IsRedundant(const std::string& name, const ModelConfig& config) {
  return name.ends_with("rotary_emb.inv_freq") || (name == kHead && config.tied_embeddings);
}

// [4, 8]
std::string ShapeText(const std::vector<int64_t>& shape) {
  return "[" + absl::StrJoin(shape, ", ") + "]";
}

// Elements [first, first + values.size()) of the flat buffer.
struct Window {
  int64_t first = 0;
  std::span<float> values;
  int64_t end() const { return first + static_cast<int64_t>(values.size()); }
};

// The part of a tensor that lies in the window, if any does.
absl::Status ReadPart(const SafetensorsFile& file, const StoredTensor& tensor,
                      const ParameterSlot& slot, const Window& window) {
  const int64_t begin = std::max(slot.offset, window.first);
  const int64_t end = std::min(slot.offset + slot.elements, window.end());
  if (begin >= end) return absl::OkStatus();
  const std::span<float> place = window.values.subspan(begin - window.first, end - begin);
  if (end - begin == slot.elements) return file.ReadFloats(tensor, place);
  std::vector<float> whole(slot.elements);
  RETURN_IF_ERROR(file.ReadFloats(tensor, whole));
  std::copy_n(whole.begin() + (begin - slot.offset), end - begin, place.begin());
  return absl::OkStatus();
}

// Copies every tensor of one file to its place; `loaded` collects their names over all files.
absl::Status ReadWeights(const std::string& path, const ModelConfig& config,
                         const std::map<std::string, const ParameterSlot*>& slots,
                         std::set<std::string>& loaded, const Window& window) {
  ASSIGN_OR_RETURN(const std::unique_ptr<SafetensorsFile> file, SafetensorsFile::Open(path));
  for (const StoredTensor& tensor : file->header().tensors) {
    const auto it = slots.find(tensor.name);
    if (it == slots.end()) {
      if (IsRedundant(tensor.name, config)) continue;
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: tensor %s is not part of the model that config.json describes", path, tensor.name));
    }
    const ParameterSlot& slot = *it->second;
    if (tensor.shape != slot.shape) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: tensor %s is %s; config.json makes it %s", path, tensor.name,
                          ShapeText(tensor.shape), ShapeText(slot.shape)));
    }
    if (!loaded.insert(tensor.name).second) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: tensor %s is in another file too", path, tensor.name));
    }
    RETURN_IF_ERROR(ReadPart(*file, tensor, slot, window));
    Progress::Tick();
  }
  return absl::OkStatus();
}

// An error where a tied model has a head that is not its embedding: trained apart, it would be
// lost. Once the embedding is in the window.
absl::Status CheckTiedHead(const std::string& path, const ParameterSlot& embedding,
                           const Window& window) {
  ASSIGN_OR_RETURN(const std::unique_ptr<SafetensorsFile> file, SafetensorsFile::Open(path));
  for (const StoredTensor& tensor : file->header().tensors) {
    if (tensor.name != kHead) continue;
    const int64_t begin = std::max(embedding.offset, window.first);
    const int64_t end = std::min(embedding.offset + embedding.elements, window.end());
    bool is_same = tensor.shape == embedding.shape;
    if (is_same && begin < end) {
      std::vector<float> head(end - begin);
      RETURN_IF_ERROR(ReadPart(*file, tensor, embedding, {.first = begin, .values = head}));
      is_same = std::equal(head.begin(), head.end(), window.values.begin() + begin - window.first);
    }
    if (!is_same) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: tensor %s is not %s, though config.json ties them; say \"tie_word_embeddings\": "
          "false to train it, or remove it",
          path, kHead, kEmbedding));
    }
  }
  return absl::OkStatus();
}

// The tensor's values as they are to be stored.
absl::StatusOr<std::span<const std::byte>> Pack(const ParameterSlot& slot, float* values,
                                                StoredType type) {
  const std::span<float> whole(values + slot.offset, static_cast<size_t>(slot.elements));
  switch (type) {
    case StoredType::kFloat32:
      if (!std::all_of(whole.begin(), whole.end(), [](float x) { return std::isfinite(x); })) {
        return absl::DataLossError(
            absl::StrFormat("tensor %s: a value is NaN or infinite", slot.name));
      }
      return std::as_bytes(whole);
    case StoredType::kBFloat16: {
      const absl::StatusOr<std::span<const std::byte>> packed = PackBFloat16(whole);
      if (packed.ok()) return packed;
      return absl::DataLossError(
          absl::StrFormat("tensor %s: %s", slot.name, packed.status().message()));
    }
    case StoredType::kFloat16:
      break;
  }
  return absl::InvalidArgumentError("models are exported in fp32 or bf16");
}

// Greedy, in layout order.
absl::StatusOr<std::vector<std::vector<TensorSource>>> SplitIntoShards(
    const ParameterLayout& layout, float* values, const ExportOptions& options) {
  std::vector<std::vector<TensorSource>> shards(1);
  int64_t shard_bytes = 0;
  for (const ParameterSlot& slot : layout.slots) {
    const int64_t bytes = slot.elements * BytesPerElement(options.type);
    if (!shards.back().empty() && shard_bytes + bytes > options.max_shard_bytes) {
      shards.emplace_back();
      shard_bytes = 0;
    }
    ASSIGN_OR_RETURN(const std::span<const std::byte> packed, Pack(slot, values, options.type));
    shards.back().push_back(
        {.name = slot.name, .shape = slot.shape, .bytes = packed, .type = options.type});
    shard_bytes += bytes;
  }
  return shards;
}

// One file needs no index; several are found through it.
absl::Status WriteWeights(const fs::path& folder,
                          const std::vector<std::vector<TensorSource>>& shards) {
  if (shards.size() == 1) return WriteSafetensors(folder / kSingleFile, shards[0]);
  Json index = {{"metadata", Json::object()}, {"weight_map", Json::object()}};
  uint64_t total_bytes = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string name =
        absl::StrFormat("model-%05d-of-%05d.safetensors", i + 1, shards.size());
    RETURN_IF_ERROR(WriteSafetensors(folder / name, shards[i]));
    for (const TensorSource& tensor : shards[i]) {
      index["weight_map"][tensor.name] = name;
      total_bytes += tensor.bytes.size();
    }
  }
  index["metadata"]["total_size"] = total_bytes;
  return WriteFileAtomically(folder / kIndexFile, index.dump(2) + "\n");
}

// ModelConfigJson says fp32.
std::string ConfigJson(const ModelConfig& config, const ExportOptions& options) {
  auto root = nlohmann::ordered_json::parse(ModelConfigJson(config));
  if (options.type == StoredType::kBFloat16) root["torch_dtype"] = "bfloat16";
  // The model that training began with may have had another mask.
  root.erase("is_causal");
  root.erase("ringleader_attention_mask");
  if (options.mask == "full") {
    root["is_causal"] = false;
  } else if (options.mask != "causal") {
    root["ringleader_attention_mask"] = options.mask;
  }
  return root.dump(2) + "\n";
}

absl::Status WriteFiles(const fs::path& folder, const ModelConfig& config,
                        const ParameterLayout& layout, float* values,
                        const ExportOptions& options) {
  RETURN_IF_ERROR(WriteFileAtomically(folder / "config.json", ConfigJson(config, options)));
  for (const auto& [name, text] : options.companions) {
    std::error_code error;
    fs::create_directories((folder / name).parent_path(), error);  // or else writing fails
    RETURN_IF_ERROR(WriteFileAtomically(folder / name, text));
  }
  ASSIGN_OR_RETURN(const auto shards, SplitIntoShards(layout, values, options));
  return WriteWeights(folder, shards);
}

}  // namespace

absl::StatusOr<std::vector<std::string>> WeightFiles(const std::string& folder) {
  const fs::path single = fs::path(folder) / kSingleFile, index = fs::path(folder) / kIndexFile;
  std::error_code ignored;
  if (fs::exists(index, ignored)) {
    ASSIGN_OR_RETURN(const auto files, ReadIndex(index));
    std::set<std::string> names;
    for (const auto& [tensor, file] : files) names.insert(file);
    // transformers takes the single file, and others the index.
    if (!names.contains(kSingleFile) && fs::exists(single, ignored)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: both %s and the shards of %s are there, and may hold different "
                          "weights; remove those that are not meant",
                          folder, kSingleFile, kIndexFile));
    }
    return std::vector<std::string>(names.begin(), names.end());
  }
  if (fs::exists(single, ignored)) return std::vector<std::string>{kSingleFile};
  return absl::NotFoundError(
      absl::StrFormat("%s: neither %s nor %s is there; give a Hugging Face "
                      "model folder with safetensors weights",
                      folder, kSingleFile, kIndexFile));
}

absl::Status LoadWeights(const std::string& folder, const ModelConfig& config,
                         const ParameterLayout& layout, float* values) {
  return LoadWeights(folder, config, layout, 0, layout.elements, values);
}

absl::Status LoadWeights(const std::string& folder, const ModelConfig& config,
                         const ParameterLayout& layout, int64_t first, int64_t count,
                         float* values) {
  ASSIGN_OR_RETURN(const std::vector<std::string> files, WeightFiles(folder));
  std::map<std::string, const ParameterSlot*> slots;
  for (const ParameterSlot& slot : layout.slots) slots[slot.name] = &slot;
  std::fill(values, values + count, 0.0f);
  const Window window{.first = first, .values = {values, static_cast<size_t>(count)}};
  std::set<std::string> loaded;
  for (const std::string& file : files) {
    RETURN_IF_ERROR(ReadWeights(fs::path(folder) / file, config, slots, loaded, window));
  }
  // A tensor left at zero would train, and nobody would notice.
  for (const ParameterSlot& slot : layout.slots) {
    if (!loaded.contains(slot.name)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: tensor %s is in none of its files", folder, slot.name));
    }
  }
  if (!config.tied_embeddings) return absl::OkStatus();
  for (const std::string& file : files) {
    RETURN_IF_ERROR(CheckTiedHead(fs::path(folder) / file, *slots.at(kEmbedding), window));
  }
  return absl::OkStatus();
}

absl::Status ExportModel(const std::string& folder, const ModelConfig& config,
                         const ParameterLayout& layout, float* values,
                         const ExportOptions& options) {
  const fs::path target = fs::path(folder).lexically_normal();
  // Leftovers of an export that was killed go first.
  const fs::path fresh = target.string() + ".new";
  std::error_code error;
  fs::remove_all(fresh, error);
  if (!error) fs::create_directories(fresh, error);
  if (error) {
    return FileError(error.value(), absl::StrFormat("create folder %s", fresh.string()));
  }

  absl::Status status = WriteFiles(fresh, config, layout, values, options);
  if (status.ok()) status = ReplaceFolder(fresh, target);
  if (!status.ok()) fs::remove_all(fresh, error);
  return status;
}

}  // namespace ringleader::model
