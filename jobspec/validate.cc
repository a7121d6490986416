#include <algorithm>
#include <cmath>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "base/text/controls.h"
#include "jobspec/fields/fields.h"
#include "jobspec/fields/scalars.h"
#include "jobspec/fields/text.h"
#include "jobspec/jobspec.h"
#include "jobspec/mistakes.h"
#include "jobspec/values/attention_spec.h"
#include "patterns/check_options.h"
#include "patterns/pattern.h"

namespace ringleader::jobspec {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

constexpr size_t kMaxPathBytes = 4096;
constexpr int kMaxLabels = 64;
constexpr size_t kMaxLabelBytes = 63;

template <typename... Args>
absl::Status Invalid(const Args&... args) {
  return absl::InvalidArgumentError(absl::StrCat(args...));
}

std::string P(std::string_view path) {
  return std::string(path);
}

bool IsJobName(std::string_view name) {
  if (name.empty() || name.size() > 63 || name.front() == '-' || name.back() == '-') return false;
  return name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-") == std::string_view::npos;
}

bool IsLabelText(std::string_view text) {
  return text.size() <= kMaxLabelBytes &&
         text.find_first_not_of(
             "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
             "-_./") == std::string_view::npos;
}

absl::Status CheckLabels(const v1::JobSpec& spec) {
  if (spec.labels_size() > kMaxLabels) {
    return Invalid("labels: ", spec.labels_size(), " given; at most ", kMaxLabels, " are allowed");
  }
  for (const auto& [key, value] : spec.labels()) {
    if (!key.empty() && IsLabelText(key) && IsLabelText(value)) continue;
    return Invalid("labels.", Printable(key),
                   ": keys and values are letters, digits and -_./, at most ", kMaxLabelBytes,
                   " characters");
  }
  return absl::OkStatus();
}

double NumberOf(const Message& message, const FieldDescriptor* descriptor, int index) {
  const google::protobuf::Reflection* reflection = message.GetReflection();
  switch (descriptor->cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32:
      return descriptor->is_repeated() ? reflection->GetRepeatedUInt32(message, descriptor, index)
                                       : reflection->GetUInt32(message, descriptor);
    case FieldDescriptor::CPPTYPE_UINT64:
      return static_cast<double>(reflection->GetUInt64(message, descriptor));
    case FieldDescriptor::CPPTYPE_INT32:
      return reflection->GetInt32(message, descriptor);
    default:
      return reflection->GetDouble(message, descriptor);
  }
}

bool InRange(const Range& range, double value) {
  if (!std::isfinite(value)) return false;
  if (range.min_is_open ? value <= range.min : value < range.min) return false;
  return range.max_is_open ? value < range.max : value <= range.max;
}

absl::Status CheckText(const Field& field, const std::string& value) {
  if (!field.is_path || value.empty() || value == field.default_value) return absl::OkStatus();
  if (value.size() > kMaxPathBytes || value.find('\0') != std::string::npos) {
    return Invalid(P(field.path), ": no usable path (", value.size(), " bytes, at most ",
                   kMaxPathBytes, ")");
  }
  if (HasControls(value)) {
    return Invalid(P(field.path), ": holds control characters: '", Printable(value), "'");
  }
  if (value[0] == '/') return absl::OkStatus();
  return Invalid(P(field.path), ": '", Printable(value), "' is relative; give an absolute path");
}

absl::Status CheckValue(const Field& field, const Message& message,
                        const FieldDescriptor* descriptor) {
  const google::protobuf::Reflection* reflection = message.GetReflection();
  switch (descriptor->cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
      return absl::OkStatus();
    case FieldDescriptor::CPPTYPE_STRING:
      return CheckText(field, reflection->GetString(message, descriptor));
    case FieldDescriptor::CPPTYPE_ENUM:
      return CheckEnumerator(field, reflection->GetEnumValue(message, descriptor));
    default: {
      const int count = descriptor->is_repeated() ? reflection->FieldSize(message, descriptor) : 1;
      for (int i = 0; i < count; ++i) {
        const double value = NumberOf(message, descriptor, i);
        if (InRange(field.range, value)) continue;
        return Invalid(P(field.path), ": ", FormatNumber(value), " is out of range; give ",
                       DescribeType(field));
      }
      return absl::OkStatus();
    }
  }
}

// What a job gets that names no pattern: key_groups where they take what is asked and save time,
// which is on GPUs alone; the CPU engine computes a tile in full for one group of it. Nothing is
// left out under another mask than the causal one, which they do not take, nor in short sequences,
// whose steps take no longer for it (docs/quality.md).
v1::AttentionSpec::Pattern DefaultPattern(const v1::JobSpec& spec) {
  constexpr uint64_t kChoosingPays = 8192;  // tokens, on GPUs
  const v1::AttentionSpec& attention = spec.attention();
  const bool is_causal =
      !attention.has_mask() || attention.mask() == v1::AttentionSpec::MASK_CAUSAL;
  const bool is_on_gpus = spec.resources().engine() == v1::ResourcesSpec::CUDA;
  const bool pays = !is_on_gpus || spec.data().sequence_length() >= kChoosingPays;
  const bool wants_choice = std::ranges::any_of(Fields(), [&](const Field& field) {
    return field.when.path == "attention.pattern" && IsSet(spec, field.path);
  });
  if (!is_causal || (!pays && !wants_choice)) return v1::AttentionSpec::DENSE;
  const bool fits = is_on_gpus && !spec.training().deterministic() && attention.tile() != 128;
  return fits ? v1::AttentionSpec::KEY_GROUPS : v1::AttentionSpec::VERTICAL_SLASH;
}

// Below which length attending to everything takes less time than choosing, where each document is
// a call of its own (docs/balance.md, Short documents); elsewhere it takes more. Under other masks
// there is no such way, and a default must not be what a job is refused for.
uint64_t DefaultDenseBelow(const v1::JobSpec& spec) {
  constexpr uint64_t kMeasured = 3072;
  const auto options = AttentionOptionsOf(spec.attention());
  const bool chooses = options.ok() && options->selection == patterns::Selection::kFull &&
                       options->mask == patterns::Mask::kCausal &&
                       !patterns::DefinitionOf(options->pattern).is_known_before_data();
  return chooses && IsByDocuments(spec.parallelism().layout()) ? kMeasured : 0;
}

// Several patterns have a share, each of something else.
absl::Status CheckWhoseDensity(const v1::JobSpec& given, const v1::JobSpec& spec) {
  if (IsSet(given, "attention.pattern") || !IsSet(given, "attention.density")) {
    return absl::OkStatus();
  }
  return Invalid(
      "attention.density: patterns mean different shares by it; name the one that is meant, "
      "attention.pattern: ",
      EnumeratorText(v1::AttentionSpec::Pattern_descriptor(), spec.attention().pattern()),
      " for the default");
}

absl::Status CheckOffload(const v1::JobSpec& given, const v1::JobSpec& spec) {
  if (Fits(*FindField("resources.offload"), spec) || !IsSet(given, "resources.offload")) {
    return absl::OkStatus();
  }
  return Invalid(
      "resources.offload: moves activations from a GPU's memory to the host's; with "
      "resources.engine: cpu they are in the host's already and there is no second memory; remove "
      "it, or set resources.engine: cuda");
}

// `given` is what the user set, `spec` has the defaults filled in.
absl::Status CheckField(const Field& field, const v1::JobSpec& given, const v1::JobSpec& spec) {
  if (field.path == "labels") return CheckLabels(spec);
  if (field.need == Need::kRequired && !IsSet(spec, field.path)) {
    return Invalid(P(field.path), ": required; give ", DescribeType(field));
  }
  if (!Fits(field, spec)) {
    if (!IsSet(given, field.path) || AnyFits(field.path, spec)) return absl::OkStatus();
    return Invalid(P(field.path), ": only fits ", Requirements(field.path),
                   "; remove it, or change that");
  }
  if (!IsSet(spec, field.path)) return absl::OkStatus();
  const ConstSlot slot = FindSlot(spec, field.path);
  return CheckValue(field, *slot.message, slot.descriptor);
}

absl::Status CheckAttention(const v1::AttentionSpec& attention) {
  if (attention.tile() != 64 && attention.tile() != 128) {
    return Invalid("attention.tile: ", attention.tile(), " is not allowed; give 64 or 128");
  }
  ASSIGN_OR_RETURN(const patterns::AttentionOptions options, AttentionOptionsOf(attention));
  RETURN_IF_ERROR(patterns::CheckPattern(options));
  std::set<uint32_t> layers;
  for (const uint32_t layer : attention.dense_layers()) {
    if (!layers.insert(layer).second) {
      return Invalid("attention.dense_layers: layer ", layer, " is listed twice");
    }
  }
  return absl::OkStatus();
}

// What a mask asks of the data.
void CheckMaskedData(const v1::JobSpec& spec, Mistakes* mistakes) {
  const v1::DataSpec& data = spec.data();
  const bool is_apart = data.batching() == v1::DataSpec::SAMPLES || data.document_mask();
  if (spec.attention().mask() == v1::AttentionSpec::MASK_PREFIX_LM && !is_apart) {
    mistakes->Add("data.document_mask",
                  "data.document_mask: false lets a token attend to the documents before its own, "
                  "but attention.mask: prefix_lm gives each document a prefix of its own; give "
                  "data.document_mask: true, or another mask");
  }
  if (Fits(*FindField("data.hidden_token"), spec) && !data.has_hidden_token()) {
    mistakes->Add("data.hidden_token",
                  absl::StrCat("data.hidden_token: required with attention.mask: ",
                               GetScalar(spec.attention(), FindDescriptor("attention.mask")),
                               ", under which a token may see the next one, so that hidden tokens "
                               "are predicted; give a token id that the data does not hold"));
  }
}

absl::Status CheckDenseBelow(const v1::JobSpec& spec) {
  const bool are_apart =
      spec.data().batching() == v1::DataSpec::SAMPLES || spec.data().document_mask();
  if (spec.attention().dense_below() == 0 || are_apart) return absl::OkStatus();
  return Invalid(
      "attention.dense_below: with data.document_mask: false there are no documents apart from "
      "others; give 0, or data.document_mask: true");
}

// `mistakes` has what does not go with the model.
void CheckParallelism(const v1::JobSpec& spec, Mistakes* mistakes) {
  const v1::ParallelismSpec& parallelism = spec.parallelism();
  const uint64_t context = parallelism.context();
  const uint64_t product = context * parallelism.data();
  if (spec.resources().max_nodes() > spec.resources().trainers()) {
    mistakes->Add(
        "resources.max_nodes",
        absl::StrCat("resources.max_nodes: ", spec.resources().max_nodes(),
                     " is more than resources.trainers (", spec.resources().trainers(), ")"));
  }
  const uint32_t tile = spec.attention().tile();
  if (parallelism.stripe() % tile != 0) {
    mistakes->Add("parallelism.stripe",
                  absl::StrCat("parallelism.stripe: ", parallelism.stripe(),
                               " is no multiple of attention.tile (", tile, ")"));
    return;
  }
  if (product != spec.resources().trainers()) {
    mistakes->Add("parallelism",
                  absl::StrCat("parallelism: context × data = ", context, " × ", parallelism.data(),
                               " = ", product, ", but resources.trainers is ",
                               spec.resources().trainers(), "; make them equal"));
    return;
  }
  const uint32_t heads = HeadRanks(parallelism);
  const bool fits_model = !mistakes->Touch({"parallelism.heads", "parallelism.head_groups"});
  if (context % heads != 0) {
    mistakes->Add(
        "parallelism.heads",
        absl::StrCat("parallelism.heads: ", heads, " does not divide parallelism.context (",
                     context, "), the trainers that share a sequence; give a divisor of it"));
    return;
  }
  mistakes->Add(HeadGroups(parallelism) > 1 ? "parallelism.head_groups" : "parallelism.heads",
                CheckHeadRanks(spec));
  if (!fits_model) return;  // what follows asks for what goes with these heads
  const uint32_t window = parallelism.ring_window();
  if (window > 0 && context / heads % window != 0) {
    mistakes->Add("parallelism.ring_window",
                  absl::StrCat("parallelism.ring_window: ", window, " does not divide the ",
                               context / heads, " trainers of the ring; give a divisor of it"));
    return;
  }
  ring::Division division = {
      .ranks = static_cast<int64_t>(context / heads), .tile = tile, .heads = heads};
  if (parallelism.layout() != v1::ParallelismSpec::LAYOUT_UNSPECIFIED) {
    const auto layout = LayoutOf(parallelism.layout());
    if (!layout.ok()) return mistakes->Add("parallelism.layout", layout.status());
    division.layout = *layout;
    division.by_documents = IsByDocuments(parallelism.layout());
    division.stripe = parallelism.stripe();
  }
  if (division.by_documents) mistakes->Add("parallelism.layout", CheckByDocuments(spec));
  mistakes->Add("data.sequence_length", CheckSequencesDivide(spec, division));
}

void CheckTraining(const v1::JobSpec& spec, Mistakes* mistakes) {
  const v1::TrainingSpec& training = spec.training();
  const auto refuse = [&](std::string_view path, const auto&... text) {
    mistakes->Add(path, absl::StrCat(P(path), ": ", text...));
  };
  if (!mistakes->Touch({"parallelism"}) &&
      training.global_batch() % spec.parallelism().data() != 0) {
    refuse("training.global_batch", training.global_batch(),
           " does not divide by parallelism.data (", spec.parallelism().data(), ")");
  }
  if (training.warmup_steps() > training.steps()) {
    refuse("training.warmup_steps", training.warmup_steps(), " is more than training.steps (",
           training.steps(), ")");
  }
  if (training.precision() != v1::TrainingSpec::BFLOAT16) {
    const uint64_t last =
        training.fp8_last_step() != 0 ? training.fp8_last_step() : training.steps();
    if (training.fp8_first_step() > std::min(last, training.steps())) {
      refuse("training.fp8_first_step", training.fp8_first_step(),
             " is after the last step in FP8 (", std::min(last, training.steps()),
             "), so that no step would be; set training.precision: bfloat16");
    }
  }
  if (training.min_learning_rate() > training.learning_rate()) {
    refuse("training.min_learning_rate", FormatNumber(training.min_learning_rate()),
           " is more than training.learning_rate (", FormatNumber(training.learning_rate()), ")");
  }
  const auto attention = AttentionOptionsOf(spec.attention());
  if (training.deterministic() && spec.resources().engine() == v1::ResourcesSpec::CUDA &&
      attention.ok() && !patterns::DefinitionOf(attention->pattern).repeats_on_gpus) {
    refuse("training.deterministic", "does not go with attention.pattern: ",
           P(patterns::DefinitionOf(attention->pattern).name),
           " on GPUs, which add gradients of its groups in any order; leave it out, choose another "
           "pattern, or give resources.engine: cpu");
  }
}

absl::Status CheckModelSpec(const v1::ModelSpec& model) {
  if (model.init() == "random" && model.config().empty()) {
    return Invalid(
        "model.config: required with model.init: random; give the path of a config.json");
  }
  if (model.init() != "random" && !model.config().empty()) {
    return Invalid(
        "model.config: the model folder in model.init has its own config.json; "
        "remove one of the two");
  }
  return absl::OkStatus();
}

// Sequences that are cut from a stream may be one document. Samples, and documents that are laid
// out one by one, are as long as their data, which is not looked at here.
absl::Status CheckPatternsLength(const v1::JobSpec& spec) {
  const auto options = AttentionOptionsOf(spec.attention());
  if (!options.ok() || spec.data().batching() == v1::DataSpec::SAMPLES ||
      spec.parallelism().layout() == v1::ParallelismSpec::DOCUMENTS) {
    return absl::OkStatus();
  }
  const auto check = patterns::DefinitionOf(options->pattern).check_length;
  return check == nullptr ? absl::OkStatus()
                          : check(*options, static_cast<int64_t>(spec.data().sequence_length()));
}

}  // namespace

absl::Status CheckByDocuments(const v1::JobSpec& spec) {
  if (spec.data().batching() != v1::DataSpec::SAMPLES && !spec.data().document_mask()) {
    return Invalid(
        "parallelism.layout: documents lays each document out by itself, but data.document_mask: "
        "false lets a token attend to the documents before its own; give data.document_mask: true, "
        "or parallelism.layout: striped");
  }
  ASSIGN_OR_RETURN(patterns::AttentionOptions options, AttentionOptionsOf(spec.attention()));
  options.by_documents = true;
  return patterns::CheckByDocuments(options);
}

bool TrainsAlikeByDocuments(const v1::JobSpec& spec) {
  return spec.attention().pattern() == v1::AttentionSpec::DENSE && CheckByDocuments(spec).ok();
}

absl::Status CheckHeadRanks(const v1::JobSpec& spec) {
  ASSIGN_OR_RETURN(patterns::AttentionOptions options, AttentionOptionsOf(spec.attention()));
  options.head_ranks = static_cast<int>(HeadRanks(spec.parallelism()));
  options.head_groups = static_cast<int>(HeadGroups(spec.parallelism()));
  options.by_documents = IsByDocuments(spec.parallelism().layout());
  return patterns::CheckHeadRanks(options);
}

absl::Status CheckSequencesDivide(const v1::JobSpec& spec, const ring::Division& division) {
  const auto tokens = static_cast<int64_t>(spec.data().sequence_length());
  RETURN_IF_ERROR(ring::CheckDivides("data.sequence_length", tokens, division));
  if (spec.data().batching() != v1::DataSpec::SAMPLES) return absl::OkStatus();
  const int64_t tile = spec.attention().tile();
  if (tokens % tile == 0) return absl::OkStatus();
  return Invalid("data.sequence_length: ", tokens, " does not divide by attention.tile (", tile,
                 "), to which data.batching: samples fills micro-batches up; give ",
                 tokens / tile * tile + tile);
}

absl::Status CheckEnumerators(const v1::JobSpec& spec) {
  for (const Field& field : Fields()) {
    const auto [message, descriptor] = FindSlot(spec, field.path);
    if (descriptor->cpp_type() != FieldDescriptor::CPPTYPE_ENUM) continue;
    const int number = message->GetReflection()->GetEnumValue(*message, descriptor);
    RETURN_IF_ERROR(CheckEnumerator(field, number));
  }
  return absl::OkStatus();
}

void ApplyDefaults(v1::JobSpec* spec) {
  if (!IsSet(*spec, "attention.pattern")) {
    spec->mutable_attention()->set_pattern(DefaultPattern(*spec));
  }
  // In the table's order every field follows those that decide whether it fits, but for
  // training.schedule, which min_learning_rate precedes, and attention.mask.
  if (!IsSet(*spec, "training.schedule")) {
    spec->mutable_training()->set_schedule(v1::TrainingSpec::COSINE);
  }
  if (!IsSet(*spec, "attention.mask")) {
    spec->mutable_attention()->set_mask(v1::AttentionSpec::MASK_CAUSAL);
  }
  for (const Field& field : Fields()) {
    const bool follows = field.default_for != nullptr;
    if ((field.need != Need::kDefault && !follows) || field.default_value == "auto") continue;
    if (IsSet(*spec, field.path) || !Fits(field, *spec)) continue;
    const std::string value = follows
                                  ? FormatNumber(field.default_for(spec->data().sequence_length()))
                                  : std::string(field.default_value);
    // The table's own defaults always parse: a test reads every one of them.
    SetScalar(FindSlot(spec, field.path), field, value).IgnoreError();
  }
  if (!spec->attention().has_dense_below() &&
      spec->attention().pattern() != v1::AttentionSpec::DENSE) {
    spec->mutable_attention()->set_dense_below(DefaultDenseBelow(*spec));
  }
  v1::ParallelismSpec* parallelism = spec->mutable_parallelism();
  if (!parallelism->has_context() && parallelism->data() != 0) {
    parallelism->set_context(spec->resources().trainers() / parallelism->data());
  }
  if (!spec->training().has_global_batch()) {
    spec->mutable_training()->set_global_batch(parallelism->data());
  }
}

void FindMistakes(const v1::JobSpec& given, Mistakes* mistakes, const model::ModelConfig& model) {
  v1::JobSpec spec = given;
  ApplyDefaults(&spec);
  if (!spec.name().empty() && !IsJobName(spec.name())) {
    mistakes->Add("name", absl::StrCat("name: '", Printable(spec.name()),
                                       "' is not allowed; give lower-case letters, digits and "
                                       "'-', at most 63, beginning and ending with a letter or "
                                       "digit"));
  }
  mistakes->Add("resources.offload", CheckOffload(given, spec));
  mistakes->Add("attention.density", CheckWhoseDensity(given, spec));
  for (const Field& field : Fields()) {
    // Derived from something that is wrong: that has an error of its own.
    if (field.need == Need::kDerived && !IsSet(given, field.path)) continue;
    if (mistakes->Has(field.path)) continue;
    mistakes->Add(field.path, CheckField(field, given, spec));
  }
  // What lies across fields is looked at where each of them is well by itself, whatever else does
  // not go together.
  if (mistakes->full()) return;  // more may be wrong than was written down
  const Mistakes alone = *mistakes;
  FindModelMistakes(spec, model, mistakes);
  if (!alone.Touch({"model"})) mistakes->Add("model", CheckModelSpec(spec.model()));
  if (!alone.Touch({"attention"})) mistakes->Add("attention", CheckAttention(spec.attention()));
  if (!alone.Touch({"data", "attention"})) {
    mistakes->Add("attention.dense_below", CheckDenseBelow(spec));
    CheckMaskedData(spec, mistakes);
    mistakes->Add("attention", CheckPatternsLength(spec));
  }
  if (!alone.Touch({"parallelism", "resources", "data", "attention"})) {
    CheckParallelism(spec, mistakes);
  }
  if (!alone.Touch({"training", "attention"})) CheckTraining(spec, mistakes);
}

absl::Status Validate(const v1::JobSpec& given, const model::ModelConfig& model) {
  Mistakes mistakes;
  FindMistakes(given, &mistakes, model);
  return mistakes.status();
}

}  // namespace ringleader::jobspec
