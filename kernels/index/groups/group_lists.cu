#include "base/status_macros.h"
#include "kernels/fused/cuda_status.h"
#include "kernels/index/groups/group_lists.h"
#include "kernels/index/threshold.cuh"

namespace ringleader::kernels::index {
namespace {

constexpr int kThreads = 256;
static_assert(kGroupTile / kGroupKeys == 8, "a byte holds the bits of a tile of keys");

// A block of threads lists what one tile of queries keeps in a head, or in those that have chosen
// together, owner by owner, a tile of keys a thread at a time.
__global__ void __launch_bounds__(kThreads)
    ListKernel(const ChosenGroups of, const ShardLayout layout, const GroupLists lists) {
  __shared__ uint64_t scan_slots[32];
  const int tile = blockIdx.x, tiles = gridDim.x, heads = blockIdx.y;
  const int64_t first = layout.Position(static_cast<int64_t>(tile) * of.tile);
  const auto* const bits =
      reinterpret_cast<const uint8_t*>(of.chosen + heads * of.rows[tiles] + of.rows[tile]);
  const int64_t row = static_cast<int64_t>(heads) * tiles + tile, keys = layout.local_tokens();
  int32_t* const groups = lists.groups + row * lists.capacity;
  int32_t place = 0;
  ShardLayout owner = layout;
  for (owner.rank = 0; owner.rank < owner.ranks; ++owner.rank) {
    if (threadIdx.x == 0) lists.bounds[owner.rank * lists.rows + row] = place;
    // Positions ascend: once one is not before the queries, no further one is.
    for (int64_t from = 0; from < keys && owner.Position(from) < first;
         from += kThreads * kGroupTile) {
      const int64_t key = from + static_cast<int64_t>(threadIdx.x) * kGroupTile;
      const int64_t position = key < keys ? owner.Position(key) : first;
      uint32_t kept = position < first ? bits[position / kGroupTile] : 0;
      const auto count = static_cast<uint32_t>(__popc(kept));
      const Scan scan = BlockScan(count, scan_slots);
      int32_t own = place + static_cast<int32_t>(scan.inclusive - count);
      for (; kept != 0 && own < lists.capacity; kept &= kept - 1, ++own) {
        groups[own] = static_cast<int32_t>(key / kGroupKeys) + __ffs(static_cast<int>(kept)) - 1;
      }
      place = min(place + static_cast<int32_t>(scan.total), lists.capacity);
    }
  }
  if (threadIdx.x == 0) lists.bounds[layout.ranks * lists.rows + row] = place;
}

}  // namespace

absl::Status ListGroups(const ChosenGroups& of, const ShardLayout& layout, int heads,
                        const GroupLists& lists, cudaStream_t stream) {
  const int64_t tiles = SpreadRows{of.tile}.Tiles(layout.local_tokens());
  RETURN_IF_ERROR(fused::CheckSize(heads, "ListGroups: heads", 1, 65535, of.heads_together));
  const int rows_of_heads = heads / of.heads_together;
  RETURN_IF_ERROR(fused::CheckSize(lists.rows, "ListGroups: rows", rows_of_heads * tiles,
                                   rows_of_heads * tiles));
  RETURN_IF_ERROR(fused::CheckSize(lists.capacity, "ListGroups: capacity", 1, INT32_MAX));
  RETURN_IF_ERROR(fused::CheckPointer(of.rows, "ListGroups: rows of chosen groups"));
  RETURN_IF_ERROR(fused::CheckPointer(of.chosen, "ListGroups: chosen groups"));
  RETURN_IF_ERROR(fused::CheckPointer(lists.groups, "ListGroups: groups"));
  RETURN_IF_ERROR(fused::CheckPointer(lists.bounds, "ListGroups: bounds"));
  ListKernel<<<dim3(static_cast<unsigned>(tiles), rows_of_heads), kThreads, 0, stream>>>(of, layout,
                                                                                         lists);
  RETURN_IF_CUDA_ERROR(cudaGetLastError(), "ListGroups");
  return absl::OkStatus();
}

}  // namespace ringleader::kernels::index
