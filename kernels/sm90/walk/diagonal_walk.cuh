// The tiles of 64 tokens that a row visits when it has block diagonals and a pipeline to itself.
#pragma once

#include <cstdint>

#include "kernels/sm90/walk/tile_walk.cuh"

namespace ringleader::kernels::sm90 {

#if defined(__CUDACC__)

// Finds what TileWalker would find along row `row`, for kToeplitz. Half as many queries share a
// walk, so it must cost less: it reads the bits of 128 candidates before it looks at the first, and
// in every layout it finds the next candidate's block by addition.
template <bool kDocuments>
class DiagonalWalker {
 public:
  __device__ DiagonalWalker(const TileWalk& walk, int32_t head, int32_t row)
      : walk_(&walk),
        diagonals_(reinterpret_cast<const uint32_t*>(walk.diagonals + static_cast<int64_t>(head) *
                                                                          walk.diagonal_words)),
        lane_(threadIdx.x % 32),
        end_(walk.key_tiles) {
    if constexpr (kDocuments) {
      next_ = PartitionPoint(walk.key_tiles,
                             [&](int32_t c) { return walk.LiesBefore<kDocuments>(c, row); });
    }
    const PositionMap& keys = walk.key_map;
    int32_t run = kMaxSequenceTokens;  // blocks that are neighbours in the sequence
    if (keys.kind != LayoutKind::kContiguous) {
      run = keys.chunk >> 6;
      skipped_ = run * (keys.kind == LayoutKind::kStriped ? keys.ranks - 1
                                                          : 2 * (keys.ranks - 1 - keys.rank));
    }
    const int32_t first = next_ + lane_;
    delta_ = (walk.FirstQuery(row) - walk.FirstKey(first)) >> 6;
    left_ = run - first % run;
    run_ = run;
    step_ = 32 + 32 / run * skipped_;
    step_in_run_ = 32 % run;
  }

  // The next active tile's column, -1 at the end.
  __device__ int32_t Next() {
    while ((active_[0] | active_[1] | active_[2] | active_[3]) == 0) {
      if (next_ >= end_) return -1;
      Look();
    }
    int word = 0;
    uint32_t bits = active_[0];
#pragma unroll
    for (int i = 1; i < kWords; ++i) {
      if (bits != 0) continue;
      word = i;
      bits = active_[i];
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (i == word) active_[i] = bits & (bits - 1);
    }
    return next_ - 32 * (kWords - word) + __ffs(bits) - 1;
  }

 private:
  static constexpr int kWords = 4;

  __device__ void Look() {
    uint32_t diagonals[kWords];
    int32_t delta[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      delta[i] = delta_;
      const bool exists = next_ + 32 * i + lane_ < walk_->key_tiles && delta_ >= 0 &&
                          delta_ < walk_->diagonal_words * 64;
      diagonals[i] = exists ? diagonals_[delta_ / 32] : 0;
      delta_ -= step_;
      left_ -= step_in_run_;
      if (left_ <= 0) {
        left_ += run_;
        delta_ -= skipped_;
      }
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      active_[i] = __ballot_sync(0xFFFFFFFFu, diagonals[i] >> (delta[i] & 31) & 1);
    }
    next_ += 32 * kWords;
    // Positions ascend: all that follows lies ahead of the queries, too.
    if (__any_sync(0xFFFFFFFFu, delta[kWords - 1] < 0)) end_ = next_;
  }

  const TileWalk* walk_;
  const uint32_t* diagonals_;
  int32_t lane_;
  int32_t next_ = 0;  // candidate of lane 0
  int32_t end_;
  // For this lane's next candidate: the blocks between it and the queries, and how many blocks of
  // its run are left, itself included. Between runs lie `skipped_` blocks of other ranks.
  int32_t delta_;
  int32_t left_;
  int32_t run_;
  int32_t skipped_ = 0;
  // How far the candidate 32 later is, where no run ends between 32 % run_ blocks.
  int32_t step_;
  int32_t step_in_run_;
  uint32_t active_[kWords] = {};  // a bit a candidate
};

#endif  // __CUDACC__

}  // namespace ringleader::kernels::sm90
