// A folder of checkpoints of a small model, saved and found by ranks that are threads.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/testing/temp_dir.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/checkpoint/checkpointer.h"
#include "worker/comm/testing/local_communicator.h"

namespace ringleader::checkpoint::testing {

inline model::ParameterLayout Layout() {
  return {.slots = {{.name = "a.weight", .shape = {3, 4}, .offset = 0, .elements = 12},
                    {.name = "norm.weight", .shape = {5}, .offset = 16, .elements = 5}},
          .elements = 32};
}

// Element i of the flat space holds i + offset, -i and i / 4; nothing in gaps and padding.
inline optim::OptimizerShard MakeShard(int rank, int ranks, float offset) {
  const model::ParameterLayout layout = Layout();
  const int64_t elements = layout.ShardElements(ranks);
  optim::OptimizerShard shard{.begin = rank * elements,
                              .master = std::vector<float>(elements),
                              .first_moment = std::vector<float>(elements),
                              .second_moment = std::vector<float>(elements)};
  for (const model::ParameterSlot& slot : layout.slots) {
    for (int64_t i = slot.offset; i < slot.offset + slot.elements; ++i) {
      const int64_t local = i - shard.begin;
      if (local < 0 || local >= elements) continue;
      shard.master[local] = static_cast<float>(i) + offset;
      shard.first_moment[local] = -static_cast<float>(i);
      shard.second_moment[local] = static_cast<float>(i) / 4;
    }
  }
  return shard;
}

inline optim::ShardSource Source(optim::OptimizerShard shard) {
  return [shard = std::move(shard)]() mutable { return std::move(shard); };
}

class CheckpointTest : public ::testing::Test {
 protected:
  // The folder is the test's attempt's, which need not be written down twice.
  CheckpointerOptions Claimed(int keep_last = 2, const std::string& resumed_from = "") {
    std::filesystem::create_directories(directory_);
    if (!std::filesystem::exists(directory_ + "/owner.json")) {
      const absl::Status claimed = ClaimDirectory(directory_, owner_);
      EXPECT_TRUE(claimed.ok()) << claimed;
    }
    return {.directory = directory_,
            .keep_last = keep_last,
            .owner = owner_,
            .resumed_from = resumed_from};
  }

  // Saves one checkpoint a step on `ranks` ranks; step s has offset s.
  void SaveSteps(int ranks, const std::vector<uint64_t>& steps, int keep_last = 2,
                 const std::string& resumed_from = "") {
    const CheckpointerOptions options = Claimed(keep_last, resumed_from);
    comm::testing::RunRanks(ranks, [&](comm::Communicator& comm) {
      std::vector<int> all(ranks);
      for (int i = 0; i < ranks; ++i) all[i] = i;
      auto own = comm.Split(all);
      ASSERT_TRUE(own.ok()) << own.status();
      Checkpointer checkpointer(options, Layout(), *std::move(own),
                                [&](uint64_t step, const absl::StatusOr<std::string>& path) {
                                  saved_.emplace_back(step, path);
                                });
      for (const uint64_t step : steps) {
        optim::OptimizerShard shard = MakeShard(comm.rank(), ranks, static_cast<float>(step));
        const int64_t elements = shard.elements();
        checkpointer.Save(Source(std::move(shard)), elements,
                          {.step = step,
                           .updates = step - 1,
                           .skipped_steps = 1,
                           .tokens = 1024 * step,
                           .data_position = 2 * step,
                           .seed = 42,
                           .job_digest = "0123abcd"});
        last_ = checkpointer.Wait();
        if (comm.rank() == 0) statuses_.push_back(last_);
      }
    });
  }

  std::optional<CheckpointInfo> Find(const model::ParameterLayout& layout = Layout()) {
    auto comm = comm::testing::LocalCommunicators(1);
    problems_.clear();
    auto found = FindNewestCheckpoint(directory_, layout, *comm[0], &problems_);
    find_status_ = found.status();
    return found.value_or(std::nullopt);
  }

  std::vector<std::string> Entries() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      const std::string name = entry.path().filename();
      if (name != "owner.json" && name != ".owner.lock") names.push_back(name);
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  TempDir temp_;
  FolderOwner owner_ = {.job = "j", .uid = "j-1", .token = 5};
  std::string directory_ = temp_.File("checkpoints");
  inline thread_local static absl::Status last_;
  std::vector<absl::Status> statuses_;
  std::vector<std::pair<uint64_t, absl::StatusOr<std::string>>> saved_;
  std::vector<std::string> problems_;
  absl::Status find_status_;
};

}  // namespace ringleader::checkpoint::testing
