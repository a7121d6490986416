// Device memory for what index::Select reads and writes, for its test and its bench.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/index/select.h"
#include "kernels/testing/device_buffer.h"

namespace ringleader::kernels {

struct SelectionBuffers {
  // Budgets of all heads, and the shape of the selection: `layout`, heads, tile, max_columns,
  // sink_tokens, local_blocks of `shape`, whose pointers are not read.
  SelectionBuffers(const index::SelectArgs& shape, const std::vector<float>& mass_shares,
                   const std::vector<int32_t>& max_counts)
      : shape(shape), shares(mass_shares), caps(max_counts) {}

  int64_t blocks() const { return (shape.layout.tokens + shape.tile - 1) / shape.tile; }
  int64_t candidates() const {  // of all ranks
    return int64_t{shape.layout.ranks} * shape.heads * shape.max_columns;
  }
  index::SelectArgs Args() const {
    index::SelectArgs args = shape;
    args.candidate_mass = candidate_mass.data();
    args.candidate_positions = candidate_positions.data();
    args.diagonal_mass = diagonal_mass.data();
    args.column_budgets = {.mass = shares.data(), .max_count = caps.data()};
    args.diagonal_budgets = args.column_budgets;
    args.workspace = workspace.data();
    args.column_positions = positions.data();
    args.column_counts = counts.data();
    args.diagonals = diagonals.data();
    args.diagonal_counts = diagonal_counts.data();
    args.residue_offsets = residue_offsets.data();
    args.residues = residues.data();
    args.load = load.data();
    args.masses = masses.data();
    return args;
  }
  // Bytes of what attention keeps of a selection.
  size_t KeptBytes() const {
    return positions.Bytes() + counts.Bytes() + diagonals.Bytes() + residue_offsets.Bytes() +
           residues.Bytes() + load.Bytes();
  }

  const index::SelectArgs shape;
  DeviceBuffer<float> shares;
  DeviceBuffer<int32_t> caps;
  DeviceBuffer<int32_t> candidate_mass{candidates()}, candidate_positions{candidates()};
  DeviceBuffer<int32_t> diagonal_mass{shape.heads * blocks()};
  DeviceBuffer<char> workspace{
      static_cast<int64_t>(index::SelectWorkspaceBytes(shape.heads, shape.layout.tokens))};
  DeviceBuffer<int64_t> positions{int64_t{shape.heads} * shape.max_columns};
  DeviceBuffer<int32_t> counts{shape.heads}, diagonal_counts{shape.heads};
  DeviceBuffer<uint64_t> diagonals{shape.heads * ((blocks() + 63) / 64)};
  DeviceBuffer<int32_t> residue_offsets{int64_t{shape.heads} * (shape.layout.ranks + 1)};
  DeviceBuffer<int32_t> residues{shape.heads * blocks()};
  DeviceBuffer<int64_t> load{shape.layout.ranks};
  DeviceBuffer<index::IndexMass> masses{shape.heads};
};

}  // namespace ringleader::kernels
