// Documents packed into one sequence (TileSelection::document_starts): the check of what callers
// pass. Starts that pass it are the same for every query between two documents' first tokens, so
// that a key before a tile of queries is seen by the tile's leading rows alone: those of the
// document that its first row belongs to.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "ringleader/kernels/attention.h"

namespace ringleader::kernels::reference {

// INVALID_ARGUMENT where a start is negative, lies ahead of its query, is below the one before it
// or within the document of the one before it, and with kFull. `tokens` queries of layout `query`.
absl::Status CheckDocuments(const TileSelection& tiles, const ShardLayout& query, int64_t tokens);

}  // namespace ringleader::kernels::reference
