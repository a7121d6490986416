// Queries and keys of tests of the gates: the same values for the device and for the oracles.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <random>
#include <vector>

#include "kernels/reference/testing/packed_documents.h"
#include "kernels/reference/testing/sight.h"
#include "kernels/testing/device_buffer.h"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::index {

// [tokens, heads, head_dim], the whole sequence. Values whose bf16 are themselves.
struct Rows {
  std::vector<float> floats;
  std::vector<__nv_bfloat16> bf16;
  int64_t tokens;
  int heads, head_dim;

  int64_t width() const { return int64_t{heads} * head_dim; }
  TokenMajor<const float> View() const {
    return {floats.data(), tokens, heads, head_dim, width(), head_dim};
  }
  // `buffer` holds rows of these heads: all of them, or a rank's.
  TokenMajor<const __nv_bfloat16> ViewOf(const DeviceBuffer<__nv_bfloat16>& buffer,
                                         int64_t its_tokens) const {
    return {buffer.data(), its_tokens, heads, head_dim, width(), head_dim};
  }
  std::vector<__nv_bfloat16> Shard(const ShardLayout& layout) const {
    std::vector<__nv_bfloat16> local;
    for (int64_t i = 0; i < layout.local_tokens(); ++i) {
      const auto row = bf16.begin() + layout.Position(i) * width();
      local.insert(local.end(), row, row + width());
    }
    return local;
  }
};

inline Rows RandomRows(int64_t tokens, int heads, int head_dim, std::mt19937& random) {
  std::normal_distribution<float> normal;
  Rows rows{.floats = {}, .bf16 = {}, .tokens = tokens, .heads = heads, .head_dim = head_dim};
  for (int64_t i = 0; i < tokens * rows.width(); ++i) {
    rows.bf16.push_back(__float2bfloat16_rn(normal(random)));
    rows.floats.push_back(__bfloat162float(rows.bf16.back()));
  }
  return rows;
}

// Where the documents of a rank's tokens start; `starts`: of the sequence, empty: it is one.
class LocalStarts {
 public:
  LocalStarts(const std::vector<int32_t>& starts, const ShardLayout& layout)
      : is_one_(starts.empty()),
        starts_(is_one_ ? std::vector<int32_t>(1)
                        : reference::testing::ShardStarts(starts, layout)) {}
  const int32_t* data() const { return is_one_ ? nullptr : starts_.data(); }

 private:
  const bool is_one_;
  const DeviceBuffer<int32_t> starts_;
};

// What the queries of a rank see, in the device's memory.
class DeviceSight {
 public:
  explicit DeviceSight(const reference::testing::RankSight& host)
      : starts_(host.document_starts),
        intervals_(host.intervals),
        key_starts_(host.key_starts),
        content_(host.content) {}
  SeenKeys seen() const {
    return {.document_starts = starts_.size() == 0 ? nullptr : starts_.data(),
            .intervals = intervals_.size() == 0 ? nullptr : intervals_.data()};
  }
  MeanKeys counted() const {
    return {.starts = key_starts_.size() == 0 ? nullptr : key_starts_.data(), .content = content_};
  }

 private:
  const DeviceBuffer<int32_t> starts_;
  const DeviceBuffer<KeyIntervals> intervals_;
  const DeviceBuffer<int32_t> key_starts_;
  const int64_t content_;
};

}  // namespace ringleader::kernels::index
