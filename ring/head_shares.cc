#include "ring/head_shares.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ringleader::ring {

namespace {

bool Divides(const HeadShares& shares) {
  return shares.heads % shares.ranks == 0 &&
         (shares.kv_heads % shares.ranks == 0 || shares.ranks % shares.kv_heads == 0);
}

}  // namespace

absl::Status CheckHeadShares(const HeadShares& shares) {
  if (shares.ranks >= 1 && Divides(shares)) return absl::OkStatus();
  std::string able;
  HeadShares other = shares;
  for (other.ranks = 1; other.ranks <= shares.heads; ++other.ranks) {
    if (Divides(other)) absl::StrAppend(&able, able.empty() ? "" : ", ", other.ranks);
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "parallelism.heads: %d trainers cannot share out %d heads over %d KV heads evenly; give one "
      "of %s",
      shares.ranks, shares.heads, shares.kv_heads, able));
}

}  // namespace ringleader::ring
