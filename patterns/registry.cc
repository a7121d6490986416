#include <cstdlib>

#include "patterns/pattern.h"

namespace ringleader::patterns {

// Each in the file of its name.
extern const PatternDefinition kDenseDefinition;
extern const PatternDefinition kSlidingWindowDefinition;
extern const PatternDefinition kVerticalSlashDefinition;
extern const PatternDefinition kBlockTopKDefinition;

namespace {

constexpr const PatternDefinition* kDefinitions[] = {
    &kDenseDefinition,
    &kSlidingWindowDefinition,
    &kVerticalSlashDefinition,
    &kBlockTopKDefinition,
};

}  // namespace

std::span<const PatternDefinition* const> Definitions() {
  return kDefinitions;
}

const PatternDefinition* FindDefinition(Pattern pattern) {
  for (const PatternDefinition* definition : kDefinitions) {
    if (definition->pattern == pattern) return definition;
  }
  return nullptr;
}

const PatternDefinition& DefinitionOf(Pattern pattern) {
  const PatternDefinition* const definition = FindDefinition(pattern);
  if (definition == nullptr) std::abort();
  return *definition;
}

}  // namespace ringleader::patterns
