#include "ring/division.h"

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ringleader::ring {

using kernels::LayoutKind;

std::string_view LayoutName(LayoutKind layout) {
  switch (layout) {
    case LayoutKind::kContiguous:
      return "contiguous";
    case LayoutKind::kZigzag:
      return "zigzag";
    case LayoutKind::kStriped:
      return "striped";
  }
  std::abort();
}

namespace {

struct Rule {
  int64_t multiple;
  std::string text;
};

Rule RuleOf(const Division& d) {
  const int64_t tiles = d.ranks * d.tile;
  const std::string rule = absl::StrFormat("context × tile = %d × %d", d.ranks, d.tile);
  switch (d.layout.value_or(LayoutKind::kContiguous)) {
    case LayoutKind::kContiguous:
      return {tiles, rule};
    case LayoutKind::kZigzag:
      return {2 * tiles, absl::StrFormat("2 × context × tile = 2 × %d × %d", d.ranks, d.tile)};
    case LayoutKind::kStriped:
      if (d.stripe == 0) return {tiles, rule};
      return {d.ranks * d.stripe, absl::StrFormat("context × stripe = %d × %d", d.ranks, d.stripe)};
  }
  std::abort();
}

std::string NameOf(const Division& d) {
  if (d.by_documents) return "documents";
  return d.layout.has_value() ? std::string(LayoutName(*d.layout)) : "auto";
}

}  // namespace

int64_t Division::Multiple() const {
  return ranks == 1 ? 1 : RuleOf(*this).multiple;
}

absl::Status CheckDivides(std::string_view field, int64_t tokens, const Division& division) {
  const int64_t multiple = division.Multiple(), below = tokens / multiple * multiple;
  if (tokens == below) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(std::string(field), ": ", tokens, " does not divide by ", RuleOf(division).text,
                   " = ", multiple, " (parallelism.layout: ", NameOf(division), "); give ",
                   below > 0 ? absl::StrCat(below, " or ") : "", below + multiple));
}

}  // namespace ringleader::ring
