// A model folder as Hugging Face lays it out: config.json and model.safetensors, or shards with an
// index.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model_shape/model_config.h"
#include "model_shape/parameter_layout.h"
#include "worker/model/files/safetensors.h"

namespace ringleader::model {

// Names of the files in `folder` that hold its weights, sorted: those of the index, or the single
// one. NOT_FOUND where there is neither.
absl::StatusOr<std::vector<std::string>> WeightFiles(const std::string& folder);

// Reads the weights of `folder` into `values` [layout.elements]; gaps become 0. Errors name the
// file and the tensor: a missing or unexpected one, another shape, a file that is not whole.
absl::Status LoadWeights(const std::string& folder, const ModelConfig& config,
                         const ParameterLayout& layout, float* values);

// Elements [first, first + count) of the flat buffer alone, into `values` [count]; what lies past
// its end becomes 0. The same errors, but for values of tensors that are not read.
absl::Status LoadWeights(const std::string& folder, const ModelConfig& config,
                         const ParameterLayout& layout, int64_t first, int64_t count,
                         float* values);

struct ExportOptions {
  StoredType type = StoredType::kFloat32;              // or kBFloat16
  std::map<std::string, std::string> companions = {};  // as ReadCompanionFiles() gives them
  // attention.mask as job files name it. config.json tells what it means to transformers: of "full"
  // is_causal: false; others but "causal" it can only carry, as ringleader_attention_mask.
  std::string mask = "causal";
  int64_t max_shard_bytes = int64_t{5} << 30;  // a larger tensor gets a file of its own
};

// Writes config.json, the weights and the companions. `folder` appears whole or not at all,
// replacing an earlier one: everything is written and synced beside it first. `values`
// [layout.elements] are used up where they are not stored in fp32: they are rounded in place.
absl::Status ExportModel(const std::string& folder, const ModelConfig& config,
                         const ParameterLayout& layout, float* values,
                         const ExportOptions& options = {});

}  // namespace ringleader::model
