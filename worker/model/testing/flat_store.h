// A ParameterStore that holds everything whole: for tests and benches.
#pragma once

#include <set>
#include <vector>

#include "model_shape/parameter_layout.h"
#include "worker/model/decoder/parameter_store.h"

namespace ringleader::model {

class FlatStore : public ParameterStore {
 public:
  // values: [layout.elements] fp32 on the CPU.
  FlatStore(const ParameterLayout& layout, const torch::Tensor& values, torch::Device device,
            torch::ScalarType type)
      : blocks_(layout.blocks),
        parameters_(values.to(device, type)),
        gradients_(torch::zeros({layout.elements}, torch::dtype(torch::kFloat).device(device))) {}

  torch::Tensor Parameters(int block, int /*next*/) override { return Block(parameters_, block); }
  int64_t version() const override { return version_; }
  torch::Tensor OpenGradient(int block) override {
    open_.insert(block);
    return Block(gradients_, block);
  }
  void CloseGradient(int block) override {
    TORCH_CHECK(open_.erase(block) == 1, "block ", block, " is not open");
    closed_.push_back(block);
  }

  // [elements], to be changed at will.
  torch::Tensor& parameters() {
    ++version_;
    return parameters_;
  }
  torch::Tensor& gradients() { return gradients_; }  // [elements] fp32
  const std::set<int>& open() const { return open_; }
  const std::vector<int>& closed() const { return closed_; }  // in the order of closing

 private:
  torch::Tensor Block(const torch::Tensor& flat, int block) const {
    return flat.narrow(0, blocks_[block].begin, blocks_[block].elements);
  }

  std::vector<ParameterBlock> blocks_;
  torch::Tensor parameters_, gradients_;
  int64_t version_ = 1;
  std::set<int> open_;
  std::vector<int> closed_;
};

}  // namespace ringleader::model
