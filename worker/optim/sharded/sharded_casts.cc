#include "worker/optim/sharded/sharded_casts.h"

#include <algorithm>
#include <utility>

#include "base/numbers/ceil_div.h"
#include "base/status_macros.h"

namespace ringleader::optim {
namespace {

using torch::Tensor;

absl::Status AllGather(ShardDevice& device, const Tensor& whole) {
  if (device.size() == 1) return absl::OkStatus();
  ASSIGN_OR_RETURN(const ShardTransferPtr transfer, device.AllGather(whole));
  return transfer == nullptr ? absl::OkStatus() : transfer->Await();
}

}  // namespace

SharedValues::SharedValues(std::vector<int64_t> bounds, const torch::TensorOptions& options)
    : bounds_(std::move(bounds)) {
  for (size_t rank = 0; rank + 1 < bounds_.size(); ++rank) {
    most_ = std::max(most_, bounds_[rank + 1] - bounds_[rank]);
  }
  all_ = torch::zeros({static_cast<int64_t>(bounds_.size() - 1) * most_}, options);
}

absl::Status SharedValues::Share(ShardDevice& device, const std::vector<Tensor>& own) {
  if (!own.empty()) {
    const Tensor values = at::cat(own);
    all_.narrow(0, device.rank() * most_, values.numel()).copy_(values);
  }
  return AllGather(device, all_);
}

Tensor SharedValues::Copy(int64_t from, int64_t to) const {
  std::vector<Tensor> parts;
  for (size_t rank = 0; rank + 1 < bounds_.size(); ++rank) {
    const int64_t begin = std::max(from, bounds_[rank]), end = std::min(to, bounds_[rank + 1]);
    if (begin >= end) continue;
    const int64_t at = static_cast<int64_t>(rank) * most_ + begin - bounds_[rank];
    parts.push_back(all_.narrow(0, at, end - begin));
  }
  return at::cat(parts);
}

ShardedCasts::ShardedCasts(const model::ParameterLayout& layout, model::CastLayers layers,
                           const model::TokenOps& ops, ShardDevice& device, const Tensor& master,
                           torch::ScalarType type)
    : layers_(layers),
      places_(model::PlacesOfLayer(layout)),
      first_block_(layout.blocks[layers.begin + 1].begin),
      block_elements_(layout.blocks[layers.begin + 1].elements),
      ops_(ops),
      device_(device),
      master_(master),
      type_(type),
      shard_elements_(master.numel()),
      shard_begin_(device.rank() * shard_elements_),
      scales_(Bounds(&ShardedCasts::RowsBefore), master.options()),
      vectors_(Bounds(&ShardedCasts::VectorsBefore), master.options().dtype(type)),
      largest_(torch::zeros({device.size(), 2}, master.options())) {
  const int64_t end = first_block_ + layers_.count() * block_elements_;
  begin_ = std::clamp(shard_begin_, first_block_, end);
  end_ = std::clamp(shard_begin_ + shard_elements_, first_block_, end);
  FindRows();
}

template <typename Body>
void ShardedCasts::ForPlaces(Body body) const {
  for (int64_t layer = 0; layer < layers_.count(); ++layer) {
    const int64_t block = first_block_ + layer * block_elements_;
    for (const model::CastBlockPlaces::Place& place : places_.places) {
      body(place, block + place.offset);
    }
  }
}

void ShardedCasts::FindRows() {
  ForPlaces([&](const model::CastBlockPlaces::Place& place, int64_t at) {
    const int64_t begin = std::max(begin_, at), end = std::min(end_, at + place.elements);
    if (place.rows == 0 || begin >= end) return;
    const int64_t width = place.width();
    const auto row_of = [&](int64_t element) { return at + (element - at) / width * width; };
    const auto add = [&](int64_t from, int64_t to) {
      if (from == to) return;
      rows_.push_back({.begin = from, .end = to, .width = width, .row_begin = row_of(from)});
    };
    const int64_t whole = row_of(begin) == begin ? begin : std::min(end, row_of(begin) + width);
    const int64_t rest = std::max(whole, row_of(end));
    add(begin, whole);
    add(whole, rest);
    add(rest, end);
  });
}

int64_t ShardedCasts::RowsBefore(int64_t element) const {
  int64_t rows = 0;
  ForPlaces([&](const model::CastBlockPlaces::Place& place, int64_t at) {
    if (place.rows == 0) return;
    if (element > at) rows += std::min(place.rows, CeilDiv(element - at, place.width()));
  });
  return rows;
}

int64_t ShardedCasts::VectorsBefore(int64_t element) const {
  int64_t elements = 0;
  ForPlaces([&](const model::CastBlockPlaces::Place& place, int64_t at) {
    if (place.rows == 0) elements += std::clamp(element - at, int64_t{0}, place.elements);
  });
  return elements;
}

std::vector<int64_t> ShardedCasts::Bounds(int64_t (ShardedCasts::*before)(int64_t) const) const {
  std::vector<int64_t> bounds;
  for (int rank = 0; rank <= device_.size(); ++rank) {
    bounds.push_back((this->*before)(rank * shard_elements_));
  }
  return bounds;
}

Tensor ShardedCasts::Values(const Rows& rows) const {
  return master_.narrow(0, rows.begin - shard_begin_, rows.end - rows.begin).to(type_);
}

absl::Status ShardedCasts::ShareLargest() {
  for (const Rows& rows : rows_) {
    if (!rows.is_part()) continue;
    const int column = rows.has_beginning() ? 1 : 0;
    largest_[device_.rank()][column].copy_(Values(rows).abs().amax());  // NaN where one is
  }
  return AllGather(device_, largest_);
}

Tensor ShardedCasts::LargestOfRow(const Rows& part) const {
  const int64_t first = part.row_begin / shard_elements_;
  const int64_t last = (part.row_begin + part.width - 1) / shard_elements_;
  return torch::maximum(largest_[first][1],
                        largest_.select(1, 0).slice(0, first + 1, last + 1).amax());
}

model::ScaledRows ShardedCasts::CastOf(const Rows& rows) const {
  const Tensor values = Values(rows);
  if (!rows.is_part()) return ops_.CastRows(values.view({-1, rows.width}));
  // A scale is the largest value's: with that of the whole row beside them, the values of a part
  // get the codes that they have in it.
  constexpr int64_t kLargest = model::ParameterLayout::kAlignment;  // a GPU's rows are multiples
  const int64_t count = values.numel();
  const Tensor row = torch::zeros({1, count + kLargest}, values.options());
  row[0].narrow(0, 0, count).copy_(values);
  row[0][count].copy_(LargestOfRow(rows));
  model::ScaledRows cast = ops_.CastRows(row);
  cast.codes = cast.codes.narrow(1, 0, count);
  return cast;
}

absl::Status ShardedCasts::Update(int64_t version, PlaceOfCodes place_of) {
  if (version_ == version) return absl::OkStatus();
  version_ = -1;  // an error leaves nothing that could be taken for casts
  RETURN_IF_ERROR(ShareLargest());
  std::vector<Tensor> scales, vectors;
  for (const Rows& rows : rows_) {
    const model::ScaledRows cast = CastOf(rows);
    place_of(rows.begin, rows.end).copy_(cast.codes.view(torch::kByte).reshape({-1}));
    if (rows.has_beginning()) scales.push_back(cast.scales.view({-1}));
  }
  RETURN_IF_ERROR(scales_.Share(device_, scales));
  ForPlaces([&](const model::CastBlockPlaces::Place& place, int64_t at) {
    const Rows own{.begin = std::max(begin_, at), .end = std::min(end_, at + place.elements)};
    if (place.rows == 0 && own.begin < own.end) vectors.push_back(Values(own));
  });
  RETURN_IF_ERROR(vectors_.Share(device_, vectors));
  version_ = version;
  return absl::OkStatus();
}

model::CastBlock ShardedCasts::Block(int64_t layer, const Tensor& gathered) const {
  const int64_t before = layer - layers_.begin;
  return {.codes = gathered.view(torch::kFloat8_e4m3fn),
          .scales = scales_.Copy(before * places_.rows, (before + 1) * places_.rows),
          .vectors = vectors_.Copy(before * places_.vectors, (before + 1) * places_.vectors)};
}

}  // namespace ringleader::optim
