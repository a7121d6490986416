#include "patterns/index/moved_choice.h"

#include "base/status_macros.h"

namespace ringleader::patterns {
namespace {

using kernels::HeadChoice;

absl::Status FindMove(const BalanceOptions& balance, const IndexInputs& inputs,
                      const int64_t* works, const DeviceArray<float>& factor, IndexDevice& device) {
  return device.Run(kernels::FindMoveStep{.works = works,
                                          .ranks = inputs.layout.ranks,
                                          .rank = inputs.layout.rank,
                                          .anchor = balance.anchor,
                                          .wanted = inputs.move,
                                          .factor = factor.data()});
}

// Writes what the heads of `work` chose to `choices`, and the sum of their work to `sum`.
absl::Status Note(const VerticalSlash& work, const LayerIndex& index, IndexDevice& device,
                  const DeviceArray<HeadChoice>& choices, const DeviceArray<int64_t>& sum) {
  RETURN_IF_ERROR(device.NoteChoices(work, index, choices.data()));
  return device.Run(kernels::SumChoicesStep{.choices = choices.data(),
                                            .heads = work.heads,
                                            .blocks = work.blocks,
                                            .tile = work.tile,
                                            .work = sum.data()});
}

}  // namespace

absl::Status MoveColumnsAndDiagonals(const BalanceOptions& balance, const IndexInputs& inputs,
                                     VerticalSlash& work, IndexDevice& device, LayerIndex& index) {
  if (!balance.is_on() || !inputs.is_balanced || inputs.move == 1.0f) {
    return absl::OkStatus();
  }
  const auto before = AllocateArray<HeadChoice>(device, work.heads),
             moved = AllocateArray<HeadChoice>(device, work.heads);
  const auto work_before = AllocateArray<int64_t>(device, 1),
             work_after = AllocateArray<int64_t>(device, 1);
  const auto factor = AllocateArray<float>(device, 1);
  RETURN_IF_ERROR(FindMove(balance, inputs, /*works=*/nullptr, factor, device));
  RETURN_IF_ERROR(Note(work, index, device, before, work_before));
  RETURN_IF_ERROR(device.Run(kernels::MoveBudgetsStep{.choices = before.data(),
                                                      .heads = work.heads,
                                                      .factor = factor.data(),
                                                      .masses = work.budget_masses.data(),
                                                      .counts = work.budget_counts.data()}));
  work.slashes_by_tiles = true;  // as MoveBudgets counts them
  RETURN_IF_ERROR(device.Select(work, index));
  RETURN_IF_ERROR(Note(work, index, device, moved, work_after));
  if (inputs.move < 1.0f) {
    RETURN_IF_ERROR(device.Run(kernels::HoldMassStep{.before = before.data(),
                                                     .moved = moved.data(),
                                                     .heads = work.heads,
                                                     .tolerance = balance.tolerance,
                                                     .masses = work.budget_masses.data(),
                                                     .counts = work.budget_counts.data()}));
    RETURN_IF_ERROR(device.Select(work, index));
    RETURN_IF_ERROR(Note(work, index, device, moved, work_after));
  }
  return device.CountMove(work_before.data(), work_after.data(), factor.data());
}

absl::Status ChooseBlocks(const BalanceOptions& balance, int tile, bool tells_work_before,
                          const IndexInputs& inputs, IndexDevice& device, LayerIndex& index,
                          absl::FunctionRef<absl::Status(const kernels::ChoiceMove&)> choose) {
  const int ranks = inputs.layout.ranks;
  if (!balance.is_on() || !inputs.is_balanced || (ranks == 1 && inputs.move == 1.0f)) {
    return choose({});
  }
  const auto works = AllocateArray<int64_t>(device, ranks);
  const auto work_after = AllocateArray<int64_t>(device, 1);
  const auto factor = AllocateArray<float>(device, 1);
  kernels::CountWorkStep count = {.chosen = index.chosen.data(),
                                  .query_layout = inputs.layout,
                                  .seen = index.seen(),
                                  .heads = inputs.heads,
                                  .tile = tile,
                                  .block_size = index.block_size};
  int64_t* const work_before = works.data() + inputs.layout.rank;
  kernels::ChoiceMove move = {.factor = factor.data(), .tolerance = balance.tolerance};
  if (tells_work_before && ranks == 1) {
    RETURN_IF_ERROR(FindMove(balance, inputs, /*works=*/nullptr, factor, device));
    move.work_before = work_before;
  } else {
    RETURN_IF_ERROR(choose({}));
    count.work = work_before;
    RETURN_IF_ERROR(device.Run(count));
    if (ranks > 1) RETURN_IF_ERROR(device.Gather(works.data(), sizeof(int64_t)));
    RETURN_IF_ERROR(FindMove(balance, inputs, works.data(), factor, device));
  }
  RETURN_IF_ERROR(choose(move));
  count.work = work_after.data();
  RETURN_IF_ERROR(device.Run(count));
  return device.CountMove(work_before, work_after.data(), factor.data());
}

}  // namespace ringleader::patterns
