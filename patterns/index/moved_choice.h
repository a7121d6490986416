// Moves a choice that was made by its own budget to the anchor of those that wait for each other
// (attention.balance; ringleader/kernels/balance_steps.h). Nothing is moved, and nothing allocated,
// where IndexInputs::move says so.
#pragma once

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "patterns/index/balance_options.h"
#include "patterns/index/index_device.h"
#include "patterns/index/layer_index.h"
#include "patterns/index/vertical_slash.h"
#include "ringleader/kernels/balance_steps.h"

namespace ringleader::patterns {

// Called after a Select of `work`. Replaces its budgets and Selects again, twice where less is to
// be kept. All ranks of a ring have made the same choice and move it alike.
absl::Status MoveColumnsAndDiagonals(const BalanceOptions& balance, const IndexInputs& inputs,
                                     VerticalSlash& work, IndexDevice& device, LayerIndex& index);

// `choose` fills index.chosen, of tiles of `tile` queries. It is called once, and where the choice
// is moved once more, unless it `tells_work_before` (ChoiceMove) and there are no other ranks of
// a ring, whose work has to be known first: they tell each other what they visit, 8 bytes each.
absl::Status ChooseBlocks(const BalanceOptions& balance, int tile, bool tells_work_before,
                          const IndexInputs& inputs, IndexDevice& device, LayerIndex& index,
                          absl::FunctionRef<absl::Status(const kernels::ChoiceMove&)> choose);

}  // namespace ringleader::patterns
