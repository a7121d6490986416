// What a sequence's length must divide into, so that every rank holds as much as any other. The job
// file's checks, the planner and trainers ask here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "ringleader/kernels/shard_layout.h"

namespace ringleader::ring {

// "contiguous", "zigzag", "striped"; aborts on a number that is no layout.
std::string_view LayoutName(kernels::LayoutKind layout);

struct Division {
  // nullopt: the planner picks; contiguous, which divides wherever another does, must work.
  std::optional<kernels::LayoutKind> layout = std::nullopt;
  int64_t ranks = 1;          // of the ring
  int64_t tile = 1;           // tokens; 1 where a shard need not be whole tiles
  int64_t stripe = 0;         // tokens, striped only; 0: one tile
  bool by_documents = false;  // kStriped is that of document_layout.h; for errors alone
  int64_t heads = 1;          // ranks that hold the tokens of each rank of the ring (head_shares.h)

  // Tokens that the length must be a multiple of: 1 for one rank, else ranks × tile (contiguous),
  // 2 × ranks × tile (zigzag) or ranks × stripe (striped); and of ranks × heads.
  int64_t Multiple() const;
};

// INVALID_ARGUMENT names `field`, the rule and the nearest lengths that divide.
absl::Status CheckDivides(std::string_view field, int64_t tokens, const Division& division);

}  // namespace ringleader::ring
