#include "worker/attention/testing/index_oracle.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "patterns/index/sequence_documents.h"

namespace ringleader::attention::testing {

namespace {

template <typename T>
std::vector<T> HostCopy(const patterns::DeviceArray<T>& array,
                        const std::function<void(void*, const void*, size_t)>& copy) {
  std::vector<T> host(array.size);
  if (array.size > 0) copy(host.data(), array.data(), host.size() * sizeof(T));
  return host;
}

// Which elements a budget takes: those before `forced`, then by falling mass.
struct Choice {
  const char* what;
  std::span<const double> mass;
  std::vector<char> chosen;
  int64_t forced = 0;
  double share = 1.0;     // of the total mass
  double max_cost = 0.0;  // what is forced counts; an element costs 1, or what `cost` says
  std::vector<double> cost = {};
};

absl::Status Check(const Choice& choice, double tolerance) {
  double total = 0, covered = 0, least_chosen = INFINITY, best_left = 0;
  double cost = 0, last_cost = 0;  // the second: of the dearest
  int64_t count = 0, unforced = 0;
  for (size_t i = 0; i < choice.mass.size(); ++i) {
    const double mass = choice.mass[i];
    const bool forced = static_cast<int64_t>(i) < choice.forced;
    total += mass;
    if (choice.chosen[i] == 0) {
      if (forced) {
        return absl::InternalError(absl::StrFormat("%s %d is forced and left", choice.what, i));
      }
      best_left = std::max(best_left, mass);
      continue;
    }
    ++count;
    covered += mass;
    cost += choice.cost.empty() ? 1.0 : choice.cost[i];
    if (forced) continue;
    last_cost = std::max(last_cost, choice.cost.empty() ? 1.0 : choice.cost[i]);
    ++unforced;
    least_chosen = std::min(least_chosen, mass);
  }
  const double slack = tolerance * total, target = choice.share * total;
  if (unforced > 0 && least_chosen < best_left - slack) {
    return absl::InternalError(absl::StrFormat("a %s of mass %g is chosen, one of %g is left",
                                               choice.what, least_chosen, best_left));
  }
  if (unforced > 0 && cost - last_cost >= choice.max_cost) {
    return absl::InternalError(absl::StrFormat("%d %ss that cost %g exceed %g", count, choice.what,
                                               cost, choice.max_cost));
  }
  if (covered < target - slack && cost < choice.max_cost && best_left > slack) {
    return absl::InternalError(
        absl::StrFormat("%d %ss of mass %g do not reach %g", count, choice.what, covered, target));
  }
  if (unforced > 0 && covered - least_chosen > target + slack) {
    return absl::InternalError(absl::StrFormat("%d %ss of mass %g are more than %g takes", count,
                                               choice.what, covered, target));
  }
  return absl::OkStatus();
}

}  // namespace

HostIndex ToHost(const patterns::LayerIndex& index,
                 const std::function<void(void*, const void*, size_t)>& copy) {
  return {.tile = index.tile,
          .diagonals = HostCopy(index.diagonals, copy),
          .diagonal_words = index.diagonal_words,
          .column_positions = HostCopy(index.column_positions, copy),
          .column_counts = HostCopy(index.column_counts, copy),
          .max_columns = index.max_columns,
          .column_keys = HostCopy(index.column_keys, copy),
          .column_values = HostCopy(index.column_values, copy),
          .chosen = HostCopy(index.chosen, copy),
          .queries_chosen = HostCopy(index.queries_chosen, copy),
          .block_size = index.block_size,
          .groups_chosen = HostCopy(index.groups_chosen, copy),
          .group_queries = index.group_tiles.tile,
          .heads_together = index.heads_together,
          .documents = index.documents};
}

HostIndex ToHost(const patterns::LayerIndex& index) {
  return ToHost(index,
                [](void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); });
}

IndexOracle::IndexOracle(const kernels::TokenMajor<const float>& q,
                         const kernels::TokenMajor<const float>& k,
                         const patterns::AttentionOptions& options, std::span<const int64_t> firsts)
    : tokens_(q.tokens), heads_(q.heads), tile_(options.tile) {
  const auto documents = patterns::MakeDocuments({.tokens = tokens_}, firsts);
  positions_ = patterns::ChooseEstimateQueries(tokens_, options.estimate_queries,
                                               options.estimate_at == patterns::EstimateAt::kSpread,
                                               documents->get())
                   .positions;
  const auto queries = static_cast<int64_t>(positions_.size());
  const int64_t blocks = (tokens_ + tile_ - 1) / tile_;
  shares_.assign(heads_ * queries * tokens_, 0.0);
  column_mass_.assign(heads_ * tokens_, 0.0);
  diagonal_mass_.assign(heads_ * blocks, 0.0);
  for (int head = 0; head < heads_; ++head) {
    const int kv_head = head / (heads_ / k.heads);
    for (int64_t e = 0; e < queries; ++e) {
      const int64_t position = positions_[e];
      // A query sees the keys of its own document, up to its own.
      const auto after = std::upper_bound(firsts.begin(), firsts.end(), position);
      const int64_t first = after == firsts.begin() ? 0 : *(after - 1);
      std::vector<double> weight(tokens_, 0.0);
      double sum = 0.0;
      for (int64_t j = first; j <= position; ++j) {
        double dot = 0.0;
        for (int x = 0; x < q.head_dim; ++x) {
          dot += double{q.data[position * q.token_stride + head * q.head_stride + x]} *
                 double{k.data[j * k.token_stride + kv_head * k.head_stride + x]};
        }
        weight[j] = std::exp(dot / std::sqrt(static_cast<double>(q.head_dim)));
        sum += weight[j];
      }
      for (int64_t j = first; j <= position; ++j) {
        const double share = weight[j] / sum;
        shares_[(head * queries + e) * tokens_ + j] = share;
        column_mass_[head * tokens_ + j] += share;
        diagonal_mass_[head * blocks + position / tile_ - j / tile_] += share;
      }
    }
  }
}

std::span<const double> IndexOracle::ColumnMass(int head) const {
  return {column_mass_.data() + head * tokens_, static_cast<size_t>(tokens_)};
}

std::span<const double> IndexOracle::DiagonalMass(int head) const {
  const size_t blocks = diagonal_mass_.size() / heads_;
  return {diagonal_mass_.data() + head * blocks, blocks};
}

absl::Status IndexOracle::CheckSelection(const HostIndex& index,
                                         const patterns::AttentionOptions& options,
                                         double tolerance) const {
  const bool top_k = options.select == patterns::Select::kTopK;
  const patterns::VerticalSlashBudget& budget = options.budget;
  for (int head = 0; head < heads_; ++head) {
    Choice columns{.what = "column",
                   .mass = ColumnMass(head),
                   .chosen = std::vector<char>(tokens_, 0),
                   .forced = options.sink_tokens,
                   .share = top_k ? 1.0 : budget.vertical_mass,
                   .max_cost = std::round(budget.density == 0.0 ? budget.max_verticals
                                                                : 0.1 * budget.density * tokens_)};
    for (const int64_t position : index.Columns(head)) columns.chosen.at(position) = 1;
    RETURN_IF_ERROR(Check(columns, tolerance));
    const std::span<const double> mass = DiagonalMass(head);
    Choice diagonals{.what = "diagonal",
                     .mass = mass,
                     .chosen = std::vector<char>(mass.size(), 0),
                     .forced = options.local_blocks + 1,
                     .share = top_k ? 1.0 : budget.slash_mass,
                     .max_cost = static_cast<double>(budget.max_slashes)};
    if (budget.density > 0.0) {  // a diagonal costs the tiles that it has
      const auto blocks = static_cast<double>(mass.size());
      diagonals.max_cost = std::round(0.8 * budget.density * blocks * (blocks + 1) / 2);
      for (double tiles = blocks; tiles > 0; --tiles) diagonals.cost.push_back(tiles);
    }
    for (size_t delta = 0; delta < mass.size(); ++delta) {
      diagonals.chosen[delta] = static_cast<char>(index.Covers(head, static_cast<int64_t>(delta)));
    }
    RETURN_IF_ERROR(Check(diagonals, tolerance));
  }
  return absl::OkStatus();
}

double IndexOracle::Recall(const HostIndex& index, int stride) const {
  double kept = 0.0;
  int64_t sampled = 0;
  for (int head = 0; head < heads_; ++head) {
    std::vector<char> column(tokens_, 0);
    for (const int64_t position : index.Columns(head)) column[position] = 1;
    for (size_t e = 0; e < positions_.size(); e += stride) {
      ++sampled;
      for (int64_t j = 0; j <= positions_[e]; ++j) {
        if (column[j] != 0 || index.Covers(head, positions_[e] / tile_ - j / tile_)) {
          kept += Share(head, static_cast<int64_t>(e), j);
        }
      }
    }
  }
  return kept / static_cast<double>(sampled);
}

}  // namespace ringleader::attention::testing
