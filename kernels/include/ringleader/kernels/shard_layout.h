// How the tokens of one sequence are dealt to the ranks of a context-parallel group. Plain data,
// usable on host and device; the position of every local token is computed, never stored.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define RINGLEADER_HOST_DEVICE __host__ __device__
#else
#define RINGLEADER_HOST_DEVICE
#endif

namespace ringleader::kernels {

enum class LayoutKind : int32_t {
  kContiguous = 0,  // rank r owns tokens [r n, (r + 1) n)
  kZigzag = 1,      // 2 W chunks; rank r owns chunks r and 2 W - 1 - r
  kStriped = 2,  // stripes of `stripe` tokens dealt round robin: stripe s belongs to rank s mod W
};

// `tokens` is the length of the whole sequence. With one rank every layout is contiguous and any
// length is allowed; with W ranks tokens must divide by W (contiguous), 2 W (zigzag) or W * stripe
// (striped). Block-wise stripes: MTraining (arXiv 2510.18830), section 4.2.
struct ShardLayout {
  LayoutKind kind = LayoutKind::kContiguous;
  int32_t ranks = 1;
  int32_t rank = 0;
  int32_t stripe = 0;  // tokens; striped only
  int64_t tokens = 0;

  RINGLEADER_HOST_DEVICE int64_t local_tokens() const { return tokens / ranks; }
  // What kZigzag cuts the sequence into: two for each rank.
  RINGLEADER_HOST_DEVICE int32_t chunks() const { return 2 * ranks; }

  // The position in the sequence of local token `i`. Grows with i in every layout.
  RINGLEADER_HOST_DEVICE int64_t Position(int64_t i) const {
    if (ranks == 1) return i;
    switch (kind) {
      case LayoutKind::kContiguous:
        return rank * local_tokens() + i;
      case LayoutKind::kZigzag: {
        const int64_t chunk = tokens / chunks();
        return i < chunk ? rank * chunk + i : (chunks() - 1 - rank) * chunk + (i - chunk);
      }
      case LayoutKind::kStriped:
        return (i / stripe * ranks + rank) * stripe + i % stripe;
    }
    return i;
  }

  // The rank that owns `position`, and its local index there.
  RINGLEADER_HOST_DEVICE int32_t Owner(int64_t position) const {
    if (ranks == 1) return 0;
    switch (kind) {
      case LayoutKind::kContiguous:
        return static_cast<int32_t>(position / local_tokens());
      case LayoutKind::kZigzag: {
        const int64_t chunk = position / (tokens / chunks());
        return static_cast<int32_t>(chunk < ranks ? chunk : chunks() - 1 - chunk);
      }
      case LayoutKind::kStriped:
        return static_cast<int32_t>(position / stripe % ranks);
    }
    return 0;
  }
  RINGLEADER_HOST_DEVICE int64_t LocalIndex(int64_t position) const {
    if (ranks == 1) return position;
    switch (kind) {
      case LayoutKind::kContiguous:
        return position % local_tokens();
      case LayoutKind::kZigzag: {
        const int64_t chunk_tokens = tokens / chunks();
        const int64_t chunk = position / chunk_tokens;
        return (chunk < ranks ? 0 : chunk_tokens) + position % chunk_tokens;
      }
      case LayoutKind::kStriped:
        return position / (static_cast<int64_t>(stripe) * ranks) * stripe + position % stripe;
    }
    return position;
  }
};

}  // namespace ringleader::kernels
