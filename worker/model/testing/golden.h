// Models under tests/golden and what transformers computed for them.
#pragma once

#include <gtest/gtest.h>
#include <torch/types.h>

#include <map>
#include <string>
#include <vector>

#include "model_shape/model_config.h"
#include "model_shape/parameter_layout.h"
#include "worker/model/files/huggingface.h"
#include "worker/model/files/safetensors.h"

namespace ringleader::model {

inline std::vector<std::string> GoldenNames() {
  return {"qwen2",         "llama",      "llama-bias",  "qwen2-linear",
          "qwen2-dynamic", "qwen2-yarn", "llama-llama3"};
}

// Every tensor of a file in fp32.
inline std::map<std::string, torch::Tensor> ReadAllTensors(const std::string& path) {
  absl::StatusOr<std::unique_ptr<SafetensorsFile>> file = SafetensorsFile::Open(path);
  EXPECT_TRUE(file.ok()) << file.status();
  std::map<std::string, torch::Tensor> tensors;
  for (const StoredTensor& stored : (*file)->header().tensors) {
    torch::Tensor tensor = torch::empty(stored.shape);
    EXPECT_TRUE(
        (*file)
            ->ReadFloats(stored, {tensor.data_ptr<float>(), static_cast<size_t>(tensor.numel())})
            .ok());
    tensors[stored.name] = tensor;
  }
  return tensors;
}

inline double RelativeError(const torch::Tensor& got, const torch::Tensor& want) {
  return ((got - want).norm() / want.norm().clamp_min(1e-12)).item<double>();
}

struct Golden {
  ModelConfig config;
  ParameterLayout layout;
  torch::Tensor values;  // [layout.elements]
  std::map<std::string, torch::Tensor> expected;
};

inline Golden LoadGolden(const std::string& name) {
  const std::string folder = "tests/golden/" + name;
  Golden golden;
  const absl::StatusOr<ModelConfig> config = LoadModelConfig(folder + "/config.json");
  EXPECT_TRUE(config.ok()) << config.status();
  golden.config = *config;
  golden.layout = MakeParameterLayout(*config);
  golden.values = torch::zeros({golden.layout.elements});
  const absl::Status loaded =
      LoadWeights(folder, *config, golden.layout, golden.values.data_ptr<float>());
  EXPECT_TRUE(loaded.ok()) << loaded;
  golden.expected = ReadAllTensors(folder + "/expected.safetensors");
  return golden;
}

}  // namespace ringleader::model
