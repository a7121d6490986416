// A ParameterStore that holds everything whole: for tests and benches.
#pragma once

#include <optional>
#include <set>
#include <vector>

#include "model_shape/parameter_layout.h"
#include "worker/model/decoder/cast_block.h"
#include "worker/model/decoder/parameter_store.h"

namespace ringleader::model {

class FlatStore : public ParameterStore {
 public:
  // values: [layout.elements] fp32 on the CPU.
  FlatStore(const ParameterLayout& layout, const torch::Tensor& values, torch::Device device,
            torch::ScalarType type)
      : blocks_(layout.blocks),
        places_(PlacesOfLayer(layout)),
        parameters_(values.to(device, type)),
        gradients_(torch::zeros({layout.elements}, torch::dtype(torch::kFloat).device(device))) {}

  torch::Tensor Parameters(int block, int /*next*/) override { return Block(parameters_, block); }
  void HoldCasts(const TokenOps& ops, CastLayers /*layers*/) override {
    ops_ = &ops;
    casts_.resize(blocks_.size());
  }
  // Made when a layer is first read after a change.
  CastBlock CastParameters(int block, int /*next*/) override {
    std::optional<CastBlock>& cast = casts_.at(block);
    if (!cast.has_value()) cast = Cast(Block(parameters_, block));
    return *cast;
  }
  void SetReadsCasts(bool /*reads_casts*/) override {}
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
    casts_.assign(casts_.size(), {});
    return parameters_;
  }
  torch::Tensor& gradients() { return gradients_; }  // [elements] fp32
  const std::set<int>& open() const { return open_; }
  const std::vector<int>& closed() const { return closed_; }  // in the order of closing

 private:
  torch::Tensor Block(const torch::Tensor& flat, int block) const {
    return flat.narrow(0, blocks_[block].begin, blocks_[block].elements);
  }

  CastBlock Cast(const torch::Tensor& values) const {
    CastBlock block;
    block.codes = torch::empty(values.sizes(), values.options().dtype(torch::kFloat8_e4m3fn));
    std::vector<torch::Tensor> scales, vectors;
    for (const CastBlockPlaces::Place& place : places_.places) {
      const torch::Tensor slot = values.narrow(0, place.offset, place.elements);
      if (place.rows == 0) {
        vectors.push_back(slot);
        continue;
      }
      const ScaledRows cast = ops_->CastRows(slot.view({place.rows, place.width()}));
      block.codes.narrow(0, place.offset, place.elements).copy_(cast.codes.view({-1}));
      scales.push_back(cast.scales.view({-1}));
    }
    block.scales = at::cat(scales);
    block.vectors = at::cat(vectors);
    return block;
  }

  std::vector<ParameterBlock> blocks_;
  CastBlockPlaces places_;
  torch::Tensor parameters_, gradients_;
  const TokenOps* ops_ = nullptr;
  std::vector<std::optional<CastBlock>> casts_;  // by block
  std::set<int> open_;
  std::vector<int> closed_;
};

}  // namespace ringleader::model
