// The layouts and ring shapes, on 1 to 4 ranks, that the attention tests of every engine go
// through.
#pragma once

#include <string>
#include <vector>

#include "ring/ring_schedule.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::attention::testing {

struct RingSetting {
  kernels::LayoutKind layout;
  ring::RingShape ring;
};

// The setting in a parameterised test's name: "StripedHierarchical2x2".
inline std::string NameOf(const RingSetting& setting) {
  const char* const layouts[] = {"Contiguous", "Zigzag", "Striped"};
  const char* const kinds[] = {"Flat", "Hierarchical", "AllGather"};
  return std::string(layouts[static_cast<int>(setting.layout)]) +
         kinds[static_cast<int>(setting.ring.kind)] + std::to_string(setting.ring.outer) + "x" +
         std::to_string(setting.ring.inner);
}

inline std::vector<RingSetting> AllRingSettings() {
  using kernels::LayoutKind;
  std::vector<RingSetting> settings;
  for (const LayoutKind layout :
       {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
    for (const ring::RingShape ring : {ring::RingShape{ring::RingKind::kFlat, 1, 1},
                                       ring::RingShape{ring::RingKind::kFlat, 2, 1},
                                       ring::RingShape{ring::RingKind::kFlat, 4, 1},
                                       ring::RingShape{ring::RingKind::kHierarchical, 2, 2},
                                       ring::RingShape{ring::RingKind::kHierarchical, 1, 4},
                                       ring::RingShape{ring::RingKind::kAllGather, 2, 1},
                                       ring::RingShape{ring::RingKind::kAllGather, 4, 1}}) {
      settings.push_back({layout, ring});
    }
  }
  return settings;
}

}  // namespace ringleader::attention::testing
