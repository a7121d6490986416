#include "ring/division.h"

#include <cstdlib>
#include <numeric>

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
  const std::string ranks = d.heads > 1 ? "context / heads" : "context";
  const std::string rule = absl::StrFormat("%s × tile = %d × %d", ranks, d.ranks, d.tile);
  switch (d.layout.value_or(LayoutKind::kContiguous)) {
    case LayoutKind::kContiguous:
      return {tiles, rule};
    case LayoutKind::kZigzag:
      return {2 * tiles, absl::StrFormat("2 × %s × tile = 2 × %d × %d", ranks, d.ranks, d.tile)};
    case LayoutKind::kStriped:
      if (d.stripe == 0) return {tiles, rule};
      return {d.ranks * d.stripe,
              absl::StrFormat("%s × stripe = %d × %d", ranks, d.ranks, d.stripe)};
  }
  std::abort();
}

std::string NameOf(const Division& d) {
  if (d.by_documents) return "documents";
  return d.layout.has_value() ? std::string(LayoutName(*d.layout)) : "auto";
}

}  // namespace

int64_t Division::Multiple() const {
  return std::lcm(ranks == 1 ? 1 : RuleOf(*this).multiple, ranks * heads);
}

absl::Status CheckDivides(std::string_view field, int64_t tokens, const Division& division) {
  const int64_t multiple = division.Multiple();
  // Ranks and heads are at least 1, and so is what they divide into.
  const int64_t below = tokens / multiple * multiple;  // NOLINT(clang-analyzer-core.DivideZero)
  if (tokens == below) return absl::OkStatus();
  const std::string rule =
      division.ranks == 1   ? absl::StrCat("parallelism.heads = ", division.heads)
      : division.heads == 1 ? absl::StrCat(RuleOf(division).text, " = ", multiple)
                            : absl::StrCat(RuleOf(division).text,
                                           " and by context = ", division.ranks * division.heads,
                                           ", together by ", multiple);
  return absl::InvalidArgumentError(
      absl::StrCat(std::string(field), ": ", tokens, " does not divide by ", rule,
                   " (parallelism.layout: ", NameOf(division), "); give ",
                   below > 0 ? absl::StrCat(below, " or ") : "", below + multiple));
}

}  // namespace ringleader::ring
