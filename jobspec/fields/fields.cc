#include "jobspec/fields/fields.h"

#include <algorithm>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/text/edit_distance.h"
#include "jobspec/fields/scalars.h"
#include "jobspec/fields/text.h"

namespace ringleader::jobspec {
namespace {

using google::protobuf::FieldDescriptor;

constexpr double kMaxCount = 4294967295.0;  // what a uint32 holds
constexpr double kMaxSteps = 1e12;          // far beyond any run, far from overflow
using patterns::kMaxTokens;

constexpr When kAlways = {};
constexpr When kSparse = {"attention.pattern", "dense", /*is_not=*/true};
constexpr When kStriped = {"parallelism.layout", "striped"};
constexpr When kHierarchical = {"parallelism.ring", "hierarchical"};
constexpr When kNotFlat = {"parallelism.ring", "flat", /*is_not=*/true};
constexpr When kNotHierarchical = {"parallelism.ring", "hierarchical", /*is_not=*/true};
constexpr When kPacked = {"data.batching", "packed"};
constexpr When kSamples = {"data.batching", "samples"};
constexpr When kDecay = {"training.schedule", "constant", /*is_not=*/true};
constexpr When kCausal = {"attention.mask", "causal"};
constexpr When kBlockCausal = {"attention.mask", "block_causal"};
// Both: what is predicted is hidden, for a query may see the next token.
constexpr When kNotCausal = {"attention.mask", "causal", /*is_not=*/true};
constexpr When kNotPrefixLm = {"attention.mask", "prefix_lm", /*is_not=*/true};
constexpr When kCuda = {"resources.engine", "cuda"};
constexpr When kFp8 = {"training.precision", "bfloat16", /*is_not=*/true};

// clang-format off
constexpr Field kFieldsBeforePatterns[] = {
    {"name", Need::kRequired, "", {}, kAlways,
     "Job id, unique in the coordinator: lower-case letters, digits and '-', at most 63 "
     "characters, beginning and ending with a letter or digit."},
    {"labels", Need::kOptional, "", {}, kAlways,
     "Free key: value pairs to list and filter jobs by; at most 64."},

    {"model.config", Need::kOptional, "", {}, kAlways,
     "Hugging Face `config.json` of a Qwen2 or Llama model. Required with `init: random`; a "
     "model folder has its own.", true},
    {"model.init", Need::kDefault, "random", {}, kAlways,
     "`random`, or the path of a Hugging Face model folder (`config.json` and safetensors) to "
     "start from.", true},

    {"data.train", Need::kRequired, "", {}, kAlways,
     "Folder of token shards to train on, as `ringctl data pack` writes them.", true},
    {"data.eval", Need::kOptional, "", {}, kAlways,
     "Folder of held-out token shards; without it there is no evaluation.", true},
    {"data.sequence_length", Need::kRequired, "", {1, kMaxTokens}, kAlways,
     "Tokens in one training sequence; with `data.batching: samples` the most in one micro-batch. "
     "With a context above 1 it must divide into whole tiles for every rank (see "
     "`parallelism.layout`), with `samples` into whole tiles in any case."},
    {"data.batching", Need::kDefault, "packed", {}, kAlways,
     "`packed`: sequences of `data.sequence_length` tokens are cut from the stream of documents. "
     "`samples`: each document is a sample, whole; a step trains `training.global_batch` of them, "
     "dealt to the data-parallel groups by predicted milliseconds, several short ones in one "
     "micro-batch but kept apart ([balance.md](balance.md))."},
    {"data.overlong", Need::kDefault, "refuse", {}, kSamples,
     "Documents of more than `data.sequence_length` tokens: the job ends with their number "
     "(`refuse`), each is cut into samples of at most so many (`split`), or left out (`drop`). The "
     "log, step reports and `ringctl report` count them."},
    {"data.dealing", Need::kDefault, "by_cost", {}, kSamples,
     "`by_cost`: a step's samples go to the groups so that all are predicted to take as long. "
     "`in_order`: one after another, each a micro-batch of its own at which the groups meet; slower, "
     "to compare with."},
    {"data.document_mask", Need::kDefault, "true", {}, kPacked,
     "Whether the documents packed into one sequence are kept apart: a token attends to tokens of "
     "its own document only, as if each document were a sequence of its own. With `false` attention "
     "reaches back into earlier documents, which suits documents that belong together, such as the "
     "files of one repository. Evaluation does the same."},
    {"data.hidden_share", Need::kDefault, "0.15", {0, 1, true}, kNotCausal,
     "Share of the tokens, others in every epoch, that is hidden from the model, which predicts them where "
     "they lie: the next token would be no task for it, because it may see that one. Evaluation hides the "
     "same ones every time.", false, kNotPrefixLm},
    {"data.hidden_token", Need::kOptional, "", {0, kMaxCount}, kNotCausal,
     "The token id that stands in their places: one of the model's vocabulary that the data does not "
     "hold. Required where it fits.", false, kNotPrefixLm},
};

constexpr Field kFieldsAfterPatterns[] = {
    {"attention.mask", Need::kDefault, "causal", {}, kAlways,
     "What a query may see of its document, or of the sequence with `data.document_mask: false`: "
     "what is not later than it (`causal`), all of it (`full`), the prefix and what is not later than "
     "it (`prefix_lm`; documents are kept apart, and `ringctl data pack` marks their prefixes), or all "
     "up to the end of its block (`block_causal`). Others than `causal` go with `attention.pattern: "
     "dense`, `sliding_window`, `block_topk`, `xattention`, `adaspa` and `fixed_blocks` ([attention.md](attention.md#masks))."},
    {"attention.mask_block", Need::kDefault, "1024", {1, kMaxTokens}, kBlockCausal,
     "Tokens in a block, counted from the first token of the document that the sequence holds."},
    {"attention.dense_layers", Need::kOptional, "[]", {0, 4095}, kSparse,
     "Layers that stay dense, by index from 0."},
    {"attention.dense_below", Need::kDerived, "0, or 3072", {0, kMaxTokens}, kSparse,
     "Documents of fewer tokens attend to all of their own tokens, whatever the pattern keeps, where documents "
     "are kept apart (`data.document_mask` or `data.batching: samples`); 0: none do. Left out it is 3072 with "
     "`parallelism.layout: documents` and a pattern that chooses online, for all such documents are one call there and take "
     "less time than by any choice ([balance.md](balance.md#short-documents)), and else 0: in stripes a sequence with documents "
     "of both kinds is computed twice, once for each, and its keys travel twice."},
    {"attention.selection", Need::kDefault, "full", {}, kSparse,
     "By which queries what a query attends to may be chosen: by whichever the pattern takes "
     "(`full`), later ones among them, or by none that is later than it (`causal`), so that no loss, "
     "in training or evaluation, knows of what it predicts. `causal` goes with `sliding_window`, "
     "`block_topk`, `moba` and `fixed_blocks`."},
    {"attention.probe_every", Need::kDefault, "16", {0, kMaxCount}, kSparse,
     "Steps between two probes of what the pattern keeps: of 64 queries a sequence (of a quarter of a short one), the share of "
     "their exact attention that lies in what they visited, by layer and head (`ringctl report`); 0: "
     "never. They have no say in the choice of that step, but under `moba`, where a query chooses for "
     "itself alone. A probe costs a layer about what the index of `vertical_slash` does.", false, kCausal},
    {"attention.balance.anchor", Need::kDefault, "none", {}, kSparse,
     "To what those that wait for each other are brought by keeping less or more than the pattern would: "
     "data-parallel groups, and trainers of a ring where their tiles of queries choose apart "
     "([balance.md](balance.md)). The one that takes least (`min`), the mean (`mean`), the one that takes "
     "most (`max`), or nothing is moved (`none`). Goes with every pattern that chooses online."},
    {"attention.balance.tolerance", Need::kDefault, "0.1", {0, 0.5}, kSparse,
     "The most that who takes longer than the anchor may lose of the share of attention that its choice was "
     "estimated to cover; 0: nothing is moved."},
    {"attention.tile", Need::kDefault, "64", {64, 128}, kAlways,
     "Edge of an attention tile in tokens: 64 or 128."},

    {"parallelism.context", Need::kDerived, "resources.trainers / parallelism.data", {1, 65536},
     kAlways,
     "Trainers that share one sequence."},
    {"parallelism.data", Need::kDefault, "1", {1, 65536}, kAlways,
     "Groups of such trainers, each with sequences of its own. `context` × `data` = "
     "`resources.trainers`."},
    {"parallelism.heads", Need::kDefault, "1", {0, 65536}, kAlways,
     "Of the `context` trainers, how many neighbours at a time share out heads: they exchange what they hold before "
     "and after attention, so that each attends to all of their tokens with its own heads (Ulysses). With fewer than "
     "`context` a ring goes around them, of `context` / `heads` (USP). Divides `context`, the model's heads, and its KV heads or a "
     "multiple of them; patterns that choose online want an even number of heads on each ([attention.md](attention.md#shared-heads)). "
     "0: the planner picks by the predicted seconds of a step."},
    {"parallelism.layout", Need::kDefault, "auto", {}, kAlways,
     "How a sequence is dealt to the trainers of a group. The sequence length must be a "
     "multiple of `context` × tile (`contiguous`, `documents`), 2 × `context` × tile (`zigzag`) or "
     "`context` × stripe (`striped`), with `heads` of a ring of `context` / `heads`, and of `context`. `documents`: long documents lie in stripes, short ones whole "
     "on one trainer, and only keys of the long ones travel; documents must be kept apart "
     "(`data.document_mask` or `data.batching: samples`), and under a pattern other than `dense` each chooses for itself. `auto`: the planner picks one of the others, and may pick "
     "`documents`, too, while the job runs (`parallelism.replan`)."},
    {"parallelism.ring", Need::kDefault, "auto", {}, kAlways,
     "How keys and values travel: around one ring (`flat`), inside nodes and between them "
     "(`hierarchical`), or all at once (`all_gather`). `auto`: the planner picks."},
    {"parallelism.ring_window", Need::kDefault, "0", {0, 65536}, kHierarchical,
     "How many neighbours make an inner ring, a divisor of the ring's trainers: the window of LoongTrain's double "
     "ring. 0: the planner picks, those of a node or an equal part of them."},
    {"parallelism.head_groups", Need::kDefault, "1", {0, 65536}, kNotFlat,
     "In how many groups of heads, one after the other, `all_gather` gathers keys and values: those of the next group travel while "
     "a group is attended with, and no trainer holds more than two groups of all tokens. Divides the KV heads of a trainer; "
     "patterns that choose online want an even number of heads in a group. 0: the planner picks, one of 1, 2, 4 and 8; with more than 1 the ring is an all-gather.", false, kNotHierarchical},
    {"parallelism.stripe", Need::kDefault, "0", {0, kMaxTokens}, kStriped,
     "Tokens in one stripe, a multiple of `attention.tile`; 0: the planner picks."},
    {"parallelism.replan", Need::kDefault, "auto", {}, kAlways,
     "Whether the plan may change while the job runs: layout, ring and stripe where the job file leaves "
     "them to the planner, and by which weights samples are dealt ([planner.md](planner.md)). `auto`: "
     "unless the job promises the same bits in every run (`training.deterministic`, and all on the CPU "
     "engine). `always`: there, too; changes are recorded with the job, so that a resumed attempt "
     "trains the same bits, but another run may change at other steps. `never`."},
    {"parallelism.kv_gradients", Need::kDefault, "float32", {}, kCuda,
     "Type in which gradients of keys and values travel between trainers. They are summed in "
     "float32 either way; `bfloat16` halves what travels and rounds the sum at every hop, for slow "
     "links between nodes."},

    {"training.steps", Need::kRequired, "", {1, kMaxSteps}, kAlways,
     "Optimizer steps."},
    {"training.global_batch", Need::kDerived, "parallelism.data", {1, 1048576}, kAlways,
     "Sequences in one optimizer step, over all groups; a multiple of `parallelism.data`."},
    {"training.learning_rate", Need::kDefault, "3e-4", {0, 10, true}, kAlways,
     "Peak learning rate."},
    {"training.min_learning_rate", Need::kDefault, "0", {0, 10}, kDecay,
     "Learning rate at the last step, if that comes after warm-up; at most `training.learning_rate`."},
    {"training.warmup_steps", Need::kDefault, "0", {0, kMaxSteps}, kAlways,
     "Steps over which the learning rate grows from 0; at most `training.steps`."},
    {"training.schedule", Need::kDefault, "cosine", {}, kAlways,
     "The learning rate after warm-up."},
    {"training.weight_decay", Need::kDefault, "0.1", {0, 10}, kAlways,
     "AdamW's decoupled weight decay; norms and biases are spared."},
    // Trainers hold these in 32 bits, which know nothing between the bounds and 1 or 0.
    {"training.beta1", Need::kDefault, "0.9", {0, 0.9999999}, kAlways,
     "AdamW's decay of the first moment."},
    {"training.beta2", Need::kDefault, "0.95", {0, 0.9999999}, kAlways,
     "AdamW's decay of the second moment."},
    {"training.epsilon", Need::kDefault, "1e-8", {1.2e-38, 1}, kAlways,
     "AdamW's term that keeps the division stable."},
    {"training.clip_norm", Need::kDefault, "1", {0, 1e9}, kAlways,
     "Largest global gradient norm; 0 switches clipping off."},
    {"training.seed", Need::kDefault, "1", {0, 9007199254740991.0}, kAlways,
     "Seed of the weights (`init: random`) and of the order of the data."},
    {"training.eval_every_steps", Need::kDefault, "0", {0, kMaxSteps}, kAlways,
     "Held-out evaluation every so many steps, and at the first and last; 0: only at first and "
     "last."},
    {"training.eval_sequences", Need::kDefault, "4", {1, 1048576}, kAlways,
     "Sequences in one evaluation; fewer where `data.eval` holds fewer, which has to hold one."},
    {"training.eval_attention", Need::kDefault, "same", {}, kSparse,
     "What evaluation attends to: what training does (`same`), everything (`dense`), or each in turn "
     "(`both`), which shows what a model that was trained sparse answers when it sees everything, and "
     "whether its loss lies below that, as it may where keys are chosen with the help of later "
     "queries."},
    {"training.max_skipped_steps", Need::kDefault, "10", {0, kMaxCount}, kAlways,
     "Steps in a row with a NaN or infinite gradient, or without a token to predict, that are "
     "skipped before the attempt fails."},
    {"training.deterministic", Need::kDefault, "false", {}, kAlways,
     "The same losses to the last bit whenever the job runs on as many trainers of the same kind (on CPUs of as many cores), on as many nodes or "
     "with `parallelism.layout` and `ring` named: on GPUs, sums in a fixed order, which takes longer. The CPU engine always does that, "
     "but for data-parallel groups with `data.batching: samples`: without this field the memory that is free decides whether they sum once a step."},

    {"training.precision", Need::kDefault, "bfloat16", {}, kAlways,
     "What the products of the decoder's linear layers read. `bfloat16`: the model's type, which on "
     "CPUs is float32. `fp8`: weights, activations and gradients in e4m3 with a scale a row, summed in "
     "float32, for the outputs and for the gradients of inputs and weights, in all layers but the "
     "first and the last; everything else and the checkpoint stay as they are "
     "([precision.md](precision.md)). `fp8_all_layers`: in those two as well, a little faster; a "
     "model that is trained from nothing learns less so. Widths of the model must be multiples of "
     "16. CPUs compute it too, slower than without."},
    {"training.fp8_first_step", Need::kDefault, "1", {1, kMaxSteps}, kFp8,
     "The first step whose products read e4m3; those before read the model's type "
     "([precision.md](precision.md))."},
    {"training.fp8_last_step", Need::kDefault, "0", {0, kMaxSteps}, kFp8,
     "The last one, so that training ends in the model's type; 0: `training.steps`."},

    {"checkpoint.directory", Need::kRequired, "", {}, kAlways,
     "Folder for checkpoints and the exported model, reachable from every node.", true},
    {"checkpoint.every_steps", Need::kDefault, "100", {0, kMaxSteps}, kAlways,
     "Steps between checkpoints; 0: only at the end and when told to stop."},
    {"checkpoint.keep_last", Need::kDefault, "2", {1, 100000}, kAlways,
     "Checkpoints to keep; older ones are deleted once a newer one is durable."},
    {"checkpoint.export_type", Need::kDefault, "float32", {}, kAlways,
     "Type of the exported model's weights. They are trained in float32; `bfloat16` halves the files "
     "and is what most tools load them as."},

    {"resources.trainers", Need::kRequired, "", {1, 65536}, kAlways,
     "Trainers in the whole job: one a GPU, or one a CPU rank."},
    {"resources.engine", Need::kDefault, "cpu", {}, kAlways,
     "What trainers compute on."},
    {"resources.threads", Need::kDefault, "0", {0, 4096}, kAlways,
     "Compute threads of one CPU trainer; 0: the node's cores divided by its trainers."},
    {"resources.max_nodes", Need::kDefault, "0", {0, 65536}, kAlways,
     "At most this many nodes; 0: any number."},
    {"resources.recompute", Need::kDefault, "auto", {}, kAlways,
     "What backward computes again instead of keeping it: nothing (`none`), all of a layer but q, "
     "k, v and attention's output (`attention_only`), or all but attention's output (`full`). "
     "`auto`: the least that fits the GPU, or the CPU trainer's share of its node's memory."},
    {"resources.offload", Need::kDefault, "auto", {}, kCuda,
     "Whether what layers keep for backward waits in the host's memory meanwhile, copied during other "
     "layers' work: never (`none`), all but three layers' at a time (`host`), or, with `auto`, as much "
     "as must where nothing else fits the GPU. A node's trainers share its memory; a job that does not "
     "fit it is refused."},
    {"resources.transfer_timeout_seconds", Need::kDefault, "180", {1, 86400}, kCuda,
     "A transfer between ranks that has not ended for so long means that one of them hangs: the "
     "attempt is aborted. Longer than one layer's attention takes."},

    {"scheduling.priority", Need::kDefault, "0", {-1000, 1000}, kAlways,
     "Higher runs first. On a coordinator with roles a priority above 0 is an admin's to give (docs/security.md)."},
    {"scheduling.max_retries", Need::kDefault, "3", {0, 1000}, kAlways,
     "Attempts that may fail without a completed step between them before the job fails."},
};
// clang-format on

// "What a query may attend to: everything before it (`dense`), ..., or ... (`block_topk`)."
std::string DescribePatterns() {
  std::string text = "What a query may attend to: ";
  const auto definitions = patterns::Definitions();
  for (size_t i = 0; i < definitions.size(); ++i) {
    absl::StrAppend(&text,
                    i == 0                       ? ""
                    : i + 1 < definitions.size() ? ", "
                                                 : ", or ",
                    std::string(definitions[i]->sees), " (`", std::string(definitions[i]->name),
                    "`)");
  }
  return text +
         ". Left out, it is `key_groups` on GPUs; `dense` there in sequences of fewer than 8,192 "
         "tokens, which takes no longer, unless a field is given that `dense` does not have; and "
         "`vertical_slash` with `resources.engine: cpu`, where `key_groups` takes longer than "
         "`dense`, and with `attention.tile: 128` or `training.deterministic`, which `key_groups` "
         "does not take on GPUs. With an `attention.mask` other than `causal` it is `dense`; "
         "`adaspa` keeps the most of those that take one. Fields of one pattern need its name.";
}

std::vector<Field> AllFields() {
  std::vector<Field> fields(std::begin(kFieldsBeforePatterns), std::end(kFieldsBeforePatterns));
  static const std::string& help = *new std::string(DescribePatterns());
  fields.push_back({"attention.pattern", Need::kDerived, "key_groups on GPUs", {}, kAlways, help});
  for (const patterns::PatternDefinition* definition : patterns::Definitions()) {
    for (const patterns::PatternField& row : definition->fields) {
      const When when = {"attention.pattern", definition->name};
      const When also = {row.with_path, row.with_value};
      const Need need = row.default_for == nullptr ? Need::kDefault : Need::kDerived;
      fields.push_back({row.path, need, row.default_value, row.range, when, row.help,
                        /*is_path=*/false, also, row.default_for});
    }
  }
  fields.insert(fields.end(), std::begin(kFieldsAfterPatterns), std::end(kFieldsAfterPatterns));
  return fields;
}

std::string_view LastName(std::string_view path) {
  const size_t dot = path.rfind('.');
  return dot == std::string_view::npos ? path : path.substr(dot + 1);
}

std::string DescribeRange(const Range& range) {
  if (range.max == std::numeric_limits<double>::infinity()) return "";
  return absl::StrCat(range.min_is_open ? " more than " : " from ", FormatNumber(range.min),
                      range.min_is_open ? (range.max_is_open ? ", less than " : ", at most ")
                                        : (range.max_is_open ? " to less than " : " to "),
                      FormatNumber(range.max));
}

}  // namespace

std::span<const Field> Fields() {
  static const std::vector<Field>& table = *new std::vector<Field>(AllFields());
  return table;
}

const Field* FindField(std::string_view path) {
  for (const Field& field : Fields()) {
    if (field.path == path) return &field;
  }
  return nullptr;
}

bool HasDefaultByPattern(const Field& field) {
  return std::ranges::any_of(Fields(), [&](const Field& other) {
    return other.path == field.path && other.default_value != field.default_value;
  });
}

std::string NearestField(std::string_view path) {
  // Long garbage cannot be near anything; it must not cost time either.
  path = path.substr(0, 128);
  const std::string_view name = LastName(path);
  std::string best;
  size_t best_distance = std::numeric_limits<size_t>::max();
  const auto consider = [&](std::string_view candidate) {
    // A field that was put into the wrong section is as near as a slip of one key.
    size_t distance = EditDistance(path, candidate);
    if (LastName(candidate) == name) distance = std::min<size_t>(distance, 1);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  };
  for (const Field& field : Fields()) {
    consider(field.path);
    const size_t dot = field.path.find('.');
    if (dot != std::string_view::npos) consider(field.path.substr(0, dot));
  }
  return best_distance <= std::max<size_t>(2, name.size() / 3) ? best : "";
}

namespace {

bool Holds(const When& when, const v1::JobSpec& spec) {
  if (when.path.empty()) return true;
  const auto [message, descriptor] = FindSlot(spec, when.path);
  return (GetScalar(*message, descriptor) == when.value) != when.is_not;
}

std::string Describe(const When& when) {
  return absl::StrCat(std::string(when.path), when.is_not ? " other than " : ": ",
                      std::string(when.value));
}

}  // namespace

bool Fits(const Field& field, const v1::JobSpec& spec) {
  return Holds(field.when, spec) && Holds(field.also, spec);
}

bool AnyFits(std::string_view path, const v1::JobSpec& spec) {
  return std::ranges::any_of(
      Fields(), [&](const Field& field) { return field.path == path && Fits(field, spec); });
}

std::string Requirements(std::string_view path) {
  std::vector<std::string> all;
  for (const Field& field : Fields()) {
    if (field.path == path) all.push_back(Requirement(field));
  }
  return absl::StrJoin(all, ", or ");
}

std::string Requirement(const Field& field) {
  if (field.when.path.empty()) return "";
  if (field.also.path.empty()) return Describe(field.when);
  if (field.also.path == field.when.path && field.when.is_not && field.also.is_not) {
    return absl::StrCat(Describe(field.when), " and ", std::string(field.also.value));
  }
  return absl::StrCat(Describe(field.when), " with ", Describe(field.also));
}

std::string DescribeType(const Field& field) {
  const FieldDescriptor* descriptor = FindDescriptor(field.path);
  if (descriptor->is_map()) return "key: value pairs";
  std::string type;
  switch (descriptor->cpp_type()) {
    case FieldDescriptor::CPPTYPE_ENUM:
      type = absl::StrCat("one of ", absl::StrJoin(EnumTexts(field), ", "));
      break;
    case FieldDescriptor::CPPTYPE_STRING:
      type = field.is_path ? "a path" : "text";
      break;
    case FieldDescriptor::CPPTYPE_BOOL:
      type = "true or false";
      break;
    case FieldDescriptor::CPPTYPE_DOUBLE:
      type = absl::StrCat("a number", DescribeRange(field.range));
      break;
    default:
      type = absl::StrCat("a whole number", DescribeRange(field.range));
  }
  return descriptor->is_repeated() ? absl::StrCat("a list, each ", type) : type;
}

const FieldDescriptor* FindDescriptor(std::string_view path) {
  const google::protobuf::Descriptor* message = v1::JobSpec::descriptor();
  const FieldDescriptor* descriptor = nullptr;
  for (const auto part : absl::StrSplit(absl::string_view(path.data(), path.size()), '.')) {
    descriptor = message->FindFieldByName(std::string(part));
    if (descriptor == nullptr) return nullptr;
    message = descriptor->message_type();
    if (message == nullptr) break;
  }
  return descriptor;
}

Slot FindSlot(v1::JobSpec* spec, std::string_view path) {
  google::protobuf::Message* message = spec;
  for (size_t dot = path.find('.'); dot != std::string_view::npos; dot = path.find('.', dot + 1)) {
    const FieldDescriptor* section = FindDescriptor(path.substr(0, dot));
    message = message->GetReflection()->MutableMessage(message, section);
  }
  return {message, FindDescriptor(path)};
}

ConstSlot FindSlot(const v1::JobSpec& spec, std::string_view path) {
  const google::protobuf::Message* message = &spec;
  for (size_t dot = path.find('.'); dot != std::string_view::npos; dot = path.find('.', dot + 1)) {
    const FieldDescriptor* section = FindDescriptor(path.substr(0, dot));
    message = &message->GetReflection()->GetMessage(*message, section);
  }
  return {message, FindDescriptor(path)};
}

bool IsSet(const v1::JobSpec& spec, std::string_view path) {
  const auto [message, descriptor] = FindSlot(spec, path);
  const google::protobuf::Reflection* reflection = message->GetReflection();
  if (descriptor->is_repeated()) return reflection->FieldSize(*message, descriptor) > 0;
  // An explicitly unspecified enumerator says nothing, as if the field were absent.
  if (descriptor->cpp_type() == FieldDescriptor::CPPTYPE_ENUM) {
    return reflection->GetEnumValue(*message, descriptor) != 0;
  }
  return reflection->HasField(*message, descriptor);
}

}  // namespace ringleader::jobspec
