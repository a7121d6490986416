#include "jobspec/values/attention_spec.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "jobspec/fields/fields.h"
#include "jobspec/fields/scalars.h"
#include "patterns/pattern.h"

namespace ringleader::jobspec {
namespace {

using kernels::LayoutKind;
using ring::RingKind;
using v1::ParallelismSpec;

constexpr std::pair<ParallelismSpec::Layout, LayoutKind> kLayouts[] = {
    {ParallelismSpec::CONTIGUOUS, LayoutKind::kContiguous},
    {ParallelismSpec::ZIGZAG, LayoutKind::kZigzag},
    {ParallelismSpec::STRIPED, LayoutKind::kStriped},
    {ParallelismSpec::DOCUMENTS, LayoutKind::kStriped},
};

constexpr std::pair<ParallelismSpec::Ring, RingKind> kRings[] = {
    {ParallelismSpec::FLAT, RingKind::kFlat},
    {ParallelismSpec::HIERARCHICAL, RingKind::kHierarchical},
    {ParallelismSpec::ALL_GATHER, RingKind::kAllGather},
};

constexpr std::pair<v1::AttentionSpec::Selection, patterns::Selection> kSelections[] = {
    {v1::AttentionSpec::FULL, patterns::Selection::kFull},
    {v1::AttentionSpec::CAUSAL, patterns::Selection::kCausal},
};

constexpr std::pair<v1::AttentionSpec::Mask, patterns::Mask> kMasks[] = {
    {v1::AttentionSpec::MASK_CAUSAL, patterns::Mask::kCausal},
    {v1::AttentionSpec::MASK_FULL, patterns::Mask::kFull},
    {v1::AttentionSpec::MASK_PREFIX_LM, patterns::Mask::kPrefixLm},
    {v1::AttentionSpec::MASK_BLOCK_CAUSAL, patterns::Mask::kBlockCausal},
};

constexpr std::pair<v1::AttentionSpec::Balance::Anchor, kernels::Anchor> kAnchors[] = {
    {v1::AttentionSpec::Balance::NONE, kernels::Anchor::kNone},
    {v1::AttentionSpec::Balance::MIN, kernels::Anchor::kMin},
    {v1::AttentionSpec::Balance::MEAN, kernels::Anchor::kMean},
    {v1::AttentionSpec::Balance::MAX, kernels::Anchor::kMax},
};

}  // namespace

absl::Status RefuseEnumerator(std::string_view path, int number) {
  RETURN_IF_ERROR(CheckEnumerator(*FindField(path), number));
  return absl::InvalidArgumentError(absl::StrCat(std::string(path), ": not set"));
}

absl::StatusOr<LayoutKind> LayoutOf(ParallelismSpec::Layout layout) {
  return Convert(kLayouts, layout, "parallelism.layout");
}

absl::StatusOr<RingKind> RingOf(ParallelismSpec::Ring ring) {
  return Convert(kRings, ring, "parallelism.ring");
}

v1::JobSpec PlannedJob(const v1::JobSpec& spec, const v1::StepPlan& plan) {
  v1::JobSpec planned = spec;
  if (PicksHeads(spec.parallelism()) && plan.heads() > 0) {
    planned.mutable_parallelism()->set_heads(plan.heads());
  }
  if (PicksHeadGroups(spec.parallelism()) && plan.head_groups() > 0) {
    planned.mutable_parallelism()->set_head_groups(plan.head_groups());
  }
  return planned;
}

absl::StatusOr<patterns::AttentionOptions> AttentionOptionsOf(const v1::AttentionSpec& spec) {
  const std::string name = EnumeratorText(v1::AttentionSpec::Pattern_descriptor(), spec.pattern());
  for (const patterns::PatternDefinition* definition : patterns::Definitions()) {
    if (definition->name != name) continue;
    patterns::AttentionOptions options;
    options.pattern = definition->pattern;
    for (const patterns::PatternField& field : definition->fields) {
      const google::protobuf::FieldDescriptor* descriptor = FindDescriptor(field.path);
      const std::string text = GetScalar(spec, descriptor);
      const bool is_set = !text.empty() && spec.GetReflection()->HasField(spec, descriptor);
      if (field.read == nullptr || !is_set || field.read(text, &options)) continue;
      return absl::InvalidArgumentError(absl::StrCat(std::string(field.path), ": ", text,
                                                     " is unknown or out of range; give ",
                                                     DescribeType(*FindField(field.path))));
    }
    options.probe_every = static_cast<int>(std::min<uint32_t>(spec.probe_every(), INT32_MAX));
    if (spec.has_mask()) {
      ASSIGN_OR_RETURN(options.mask, Convert(kMasks, spec.mask(), "attention.mask"));
    }
    options.mask_block = spec.mask_block();
    if (spec.has_selection()) {
      ASSIGN_OR_RETURN(options.selection,
                       Convert(kSelections, spec.selection(), "attention.selection"));
    }
    if (spec.balance().has_anchor()) {
      ASSIGN_OR_RETURN(options.balance.anchor,
                       Convert(kAnchors, spec.balance().anchor(), "attention.balance.anchor"));
    }
    if (spec.balance().has_tolerance()) {
      options.balance.tolerance = static_cast<float>(spec.balance().tolerance());
    }
    if (spec.has_tile()) options.tile = static_cast<int>(spec.tile());
    options.dense_below = static_cast<int64_t>(spec.dense_below());
    options.dense_layers.assign(spec.dense_layers().begin(), spec.dense_layers().end());
    return options;
  }
  return RefuseEnumerator("attention.pattern", spec.pattern());
}

}  // namespace ringleader::jobspec
