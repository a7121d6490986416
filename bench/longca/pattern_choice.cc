#include "bench/longca/pattern_choice.h"

#include <cstdlib>

#include "absl/strings/str_format.h"
#include "patterns/pattern.h"

namespace ringleader::bench {
namespace {

bool IsChoosing(const patterns::PatternDefinition& definition) {
  return definition.set_density != nullptr && !definition.goes_by_distance();
}

}  // namespace

std::string PatternChoice::name() const {
  if (is_all()) return "all";
  return absl::StrFormat("%s %g %%", patterns::DefinitionOf(pattern).name, 100 * density);
}

bool PatternChoice::GoesWith(const Asked& asked) const {
  if (is_all()) return true;
  return asked.window == 0 && asked.visible.empty() &&
         (asked.mask == patterns::Mask::kCausal || patterns::DefinitionOf(pattern).takes_masks);
}

void PatternChoice::Apply(int64_t tokens, patterns::AttentionOptions* options) const {
  if (is_all()) return;
  options->pattern = pattern;
  options->block_size = options->tile;
  patterns::DefinitionOf(pattern).set_density(options, tokens, density);
}

std::vector<std::string> ChoosingPatterns() {
  std::vector<std::string> names;
  for (const patterns::PatternDefinition* definition : patterns::Definitions()) {
    if (IsChoosing(*definition)) names.emplace_back(definition->name);
  }
  return names;
}

patterns::Pattern PatternCalled(const std::string& name) {
  for (const patterns::PatternDefinition* definition : patterns::Definitions()) {
    if (definition->name == name) return definition->pattern;
  }
  std::abort();
}

}  // namespace ringleader::bench
