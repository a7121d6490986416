#include "worker/optim/sharded/gathered_parameters.h"

#include <utility>

#include "base/status_macros.h"
#include "kernels/ops/check_status.h"
#include "worker/optim/sharded/block_owners.h"

namespace ringleader::optim {

using kernels::ops::Check;
using torch::Tensor;

GatheredParameters::GatheredParameters(const model::ParameterLayout& layout, ShardDevice& device,
                                       const Tensor& master, torch::ScalarType type, bool is_whole)
    : layout_(layout),
      device_(device),
      master_(master),
      type_(type),
      is_whole_(is_whole),
      elements_(master.numel()),
      begin_(device.rank() * elements_),
      places_(is_whole ? layout.blocks.size() : kPlaces) {
  if (is_whole_) {
    whole_ = torch::empty({elements_ * device.size()}, master.options().dtype(type));
  }
}

Tensor GatheredParameters::Own() const {
  return whole_.defined() ? whole_.narrow(0, begin_, elements_) : Tensor();
}

absl::Status GatheredParameters::Gather() {
  ++version_;
  if (whole_.defined()) {
    if (device_.size() == 1) return absl::OkStatus();
    ASSIGN_OR_RETURN(ShardTransferPtr transfer, device_.AllGather(whole_));
    gathering_.push_back(std::move(transfer));
    return absl::OkStatus();
  }
  for (Place& place : places_) place.block = -1;
  // Before anything takes up the links.
  if (casts_.has_value() && reads_casts_) RETURN_IF_ERROR(UpdateCasts());
  if (!is_whole_) {
    RETURN_IF_ERROR(Fetch(0));
    return Fetch(LastBlock(layout_));
  }
  for (int block = 0; block <= LastBlock(layout_); ++block) RETURN_IF_ERROR(Fetch(block));
  return absl::OkStatus();
}

void GatheredParameters::HoldCasts(const model::TokenOps& ops, model::CastLayers layers) {
  TORCH_CHECK(!casts_.has_value(), "casts are held already");
  casts_.emplace(layout_, layers, ops, device_, master_, type_);
  if (!is_whole_) {
    own_codes_ =
        torch::empty({casts_->end() - casts_->begin()}, master_.options().dtype(torch::kByte));
  }
  Check(GatherInForm());
}

void GatheredParameters::SetReadsCasts(bool reads_casts) {
  if (reads_casts_ == reads_casts) return;
  reads_casts_ = reads_casts;
  if (casts_.has_value()) Check(GatherInForm());
}

bool GatheredParameters::IsCast(int block) const {
  return casts_.has_value() && reads_casts_ && IsLayer(layout_, block) &&
         casts_->layers().contains(block - 1);
}

Tensor GatheredParameters::Parameters(int block, int next) {
  if (whole_.defined()) {
    Check(Await(gathering_));
    const model::ParameterBlock& range = layout_.blocks[block];
    return whole_.narrow(0, range.begin, range.elements);
  }
  TORCH_CHECK(!IsCast(block), "layer ", block - 1, " is there as casts alone");
  return Read(block, next).view(type_);
}

model::CastBlock GatheredParameters::CastParameters(int block, int next) {
  TORCH_CHECK(IsCast(block), "block ", block, " is not there as casts");
  return casts_->Block(block - 1, Read(block, next));
}

GatheredParameters::Place& GatheredParameters::PlaceFor(int block) {
  return places_[is_whole_ ? block : PlaceOf(layout_, block)];
}

int64_t GatheredParameters::BytesOf(bool is_cast) const {
  return is_cast ? 1 : static_cast<int64_t>(c10::elementSize(type_));
}

// Whether layers are cast has changed: what is held whole is so in the other form.
absl::Status GatheredParameters::GatherInForm() {
  if (!is_whole_) return absl::OkStatus();  // blocks are gathered as they are read
  RETURN_IF_ERROR(Await(gathering_));
  whole_.reset();
  for (Place& place : places_) {
    RETURN_IF_ERROR(Await(place.broadcasts));
    place = {};
  }
  return Gather();  // of another version: casts are made again, for other memory
}

// Casts this rank's weights as they are now: to where they are gathered, if that holds all layers,
// or to where they are sent from.
absl::Status GatheredParameters::UpdateCasts() {
  if (is_whole_) {
    for (int64_t layer = casts_->layers().begin; layer < casts_->layers().end; ++layer) {
      RETURN_IF_ERROR(RoomFor(static_cast<int>(layer) + 1).status());
    }
  }
  return casts_->Update(version_, [&](int64_t from, int64_t to) {
    if (!is_whole_) return own_codes_.narrow(0, from - casts_->begin(), to - from);
    const model::ParameterBlock& first = layout_.blocks[1];  // layers differ in nothing
    const auto block = static_cast<int>(1 + (from - first.begin) / first.elements);
    return PlaceFor(block).buffer.narrow(0, from - layout_.blocks[block].begin, to - from);
  });
}

// The bytes where a block is gathered, as it is read now, when nothing is on its way there.
absl::StatusOr<Tensor> GatheredParameters::RoomFor(int block) {
  const int64_t bytes = layout_.blocks[block].elements * BytesOf(IsCast(block));
  Place& place = PlaceFor(block);
  RETURN_IF_ERROR(Await(place.broadcasts));
  if (!place.buffer.defined() || place.buffer.numel() < bytes) {
    place.buffer = torch::empty({bytes}, master_.options().dtype(torch::kByte));
  }
  return place.buffer.narrow(0, 0, bytes);
}

// Begins to gather a block in its place, after all that is enqueued so far, readers of the place
// included.
absl::Status GatheredParameters::Fetch(int block) {
  const model::ParameterBlock& range = layout_.blocks[block];
  const bool is_cast = IsCast(block);
  if (is_cast && !is_whole_) RETURN_IF_ERROR(UpdateCasts());  // else Gather has
  ASSIGN_OR_RETURN(const Tensor room, RoomFor(block));
  Place& place = PlaceFor(block);
  place.block = block;
  place.is_cast = is_cast;
  return ForOwners(range, elements_, [&](int owner, int64_t from, int64_t to) -> absl::Status {
    const int64_t element_bytes = BytesOf(is_cast);
    const Tensor part =
        room.narrow(0, (from - range.begin) * element_bytes, (to - from) * element_bytes);
    const bool is_mine = owner == device_.rank();
    if (is_mine && is_cast && !is_whole_) {
      part.copy_(own_codes_.narrow(0, from - casts_->begin(), to - from));
    }
    if (is_mine && !is_cast) {
      part.view(type_).copy_(master_.narrow(0, from - begin_, to - from));
    }
    if (device_.size() == 1) return absl::OkStatus();
    ASSIGN_OR_RETURN(ShardTransferPtr broadcast, device_.Broadcast(part, owner));
    place.broadcasts.push_back(std::move(broadcast));
    return absl::OkStatus();
  });
}

// The block's bytes, while `next` is on its way.
Tensor GatheredParameters::Read(int block, int next) {
  const auto is_there = [&](int wanted) {
    const Place& place = PlaceFor(wanted);
    return place.block == wanted && place.is_cast == IsCast(wanted);
  };
  if (!is_there(block)) Check(Fetch(block));
  const absl::StatusOr<Tensor> bytes = RoomFor(block);
  Check(bytes.status());
  // The other place's layer has been used: its reader is enqueued.
  if (IsLayer(layout_, next) && !is_there(next)) Check(Fetch(next));
  return *bytes;
}

}  // namespace ringleader::optim
