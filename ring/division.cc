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

// The factors of a multiple, and how an error names them.
struct Rule {
  int64_t twice;  // 2 for zigzag's two chunks a rank
  int64_t run;    // tokens that stay together
  const char* run_name;
};

Rule RuleOf(const Division& division) {
  switch (division.layout.value_or(LayoutKind::kContiguous)) {
    case LayoutKind::kContiguous:
      return {1, division.tile, "tile"};
    case LayoutKind::kZigzag:
      return {2, division.tile, "tile"};
    case LayoutKind::kStriped:
      if (division.stripe == 0) return {1, division.tile, "tile"};
      return {1, division.stripe, "stripe"};
  }
  std::abort();
}

}  // namespace

int64_t Division::Multiple() const {
  if (ranks == 1) return 1;
  const Rule rule = RuleOf(*this);
  return rule.twice * ranks * rule.run;
}

absl::Status CheckDivides(std::string_view field, int64_t tokens, const Division& division) {
  const int64_t multiple = division.Multiple();
  if (tokens % multiple == 0) return absl::OkStatus();
  const Rule rule = RuleOf(division);
  const char* const twice = rule.twice == 2 ? "2 × " : "";
  const int64_t below = tokens / multiple * multiple;
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s: %d does not divide by %scontext × %s = %s%d × %d = %d (parallelism.layout: %s); give "
      "%s%d",
      std::string(field), tokens, twice, rule.run_name, twice, division.ranks, rule.run, multiple,
      division.layout.has_value() ? std::string(LayoutName(*division.layout)) : "auto",
      below > 0 ? absl::StrCat(below, " or ") : "", below + multiple));
}

}  // namespace ringleader::ring
