#include "jobspec/fields/reference.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "jobspec/fields/fields.h"
#include "patterns/pattern.h"

namespace ringleader::jobspec {
namespace {

constexpr char kPreamble[] = R"(# The job file

`ringctl submit job.yaml` sends one job. The file is YAML; every field is in the tables below, with
its default and its limits. Unknown fields are errors. Relative paths are taken from the job file's
folder. `--set path=value` overrides a field (`--set training.steps=100`), and `--set path=` puts
it back to its default; one that changes what other fields go with (the pattern, the mask, the ring, the engine) drops the
file's fields that no longer fit. `ringctl validate job.yaml` says all that is wrong, or shows the
file with every default, with what `auto` becomes as comments and what the planner makes of it, and asks no coordinator;
`ringctl submit job.yaml --dry-run` does the same and asks one that answers.

This page is generated from `jobspec/fields/fields.cc` and, for fields of one attention pattern, from the
pattern's definition in `patterns/`; a test keeps the two alike
(`RINGLEADER_UPDATE_DOCS=1 build/bin/jobspec_test` writes it anew).

```yaml
name: headers-16k
model: {config: ./config.json, init: random}      # or init: /path/to/huggingface/model
data: {train: ./tokens/train, eval: ./tokens/eval, sequence_length: 16384}
attention: {pattern: vertical_slash, select: top_p, vertical_mass: 0.9, slash_mass: 0.9, dense_layers: [0]}
parallelism: {context: 4, data: 1, layout: auto, ring: auto}
training: {steps: 40, global_batch: 1, learning_rate: 3e-4, warmup_steps: 4, seed: 1}
checkpoint: {directory: ./checkpoints, every_steps: 10, keep_last: 2}
resources: {trainers: 4}
```
)";

constexpr char kPatternsPreamble[] = R"(# Attention patterns

What a query may attend to is one of the patterns below, chosen for a job by `attention.pattern`. All
go with every layout and ring, and are computed in tiles of `attention.tile` tokens
([attention.md](attention.md), which says which of them go with other masks than the causal one). Each is one definition in `patterns/`: its name, its fields of the job file, its
checks, how its index is built and its tiles are counted, what the planner assumes of it, and its section here.

This page is generated from those definitions; a test keeps the two alike
(`RINGLEADER_UPDATE_DOCS=1 build/bin/jobspec_test` writes it anew).
)";

constexpr char kAddingAPattern[] = R"(
## Adding an attention pattern

Beside its kernels and tests, a pattern takes these files:

1. `proto/ringleader/v1/job_spec.proto`: an enumerator of `AttentionSpec.Pattern`, and its fields if it has any.
2. `patterns/attention_options.h`: an enumerator of `patterns::Pattern`, and the options that its fields fill.
3. `patterns/kinds/<name>.cc`: its definition (`patterns/pattern.h`). `build` says how a layer's index is built from the
   verbs of a device (`patterns/index/index_device.h`), the same for CPU and GPU.
4. `patterns/registry.cc`: a line for the definition. Its name is the protocol's enumerator in lower case.
5. `patterns/CMakeLists.txt`: the source.

Then `RINGLEADER_UPDATE_DOCS=1 build/bin/jobspec_test` writes `docs/job_file.md` and this page. Parsing, defaults, checks,
`ringctl plan`, the coordinator's planner, the trainers' assignment, the ring and its devices need no change: they go
through the definition. A pattern that one of them does not know is refused by its number. The kernels of a pattern that
scores blocks are steps of `kernels/include/ringleader/kernels/block_choice.h`, which devices pass on as they are.
)";

std::string DefaultText(const Field& field) {
  switch (field.need) {
    case Need::kRequired:
      return "required";
    case Need::kOptional:
      return field.default_value.empty() ? "none"
                                         : absl::StrCat("`", std::string(field.default_value), "`");
    case Need::kDefault:
    case Need::kDerived:
      break;
  }
  return absl::StrCat("`", std::string(field.default_value), "`");
}

std::string Section(std::string_view path) {
  const size_t dot = path.find('.');
  return std::string(dot == std::string_view::npos ? "" : path.substr(0, dot));
}

constexpr char kTableHead[] = "| field | default | allowed | meaning |\n|---|---|---|---|\n";

std::string TableRow(const Field& field) {
  std::string help(field.help);
  if (const std::string requirement = Requirement(field); !requirement.empty()) {
    absl::StrAppend(&help, " Only with ", requirement, ".");
  }
  return absl::StrCat("| `", std::string(field.path), "` | ", DefaultText(field), " | ",
                      DescribeType(field), " | ", help, " |\n");
}

}  // namespace

std::string ReferencePage() {
  std::string page = kPreamble;
  std::string section = "-";
  for (const Field& field : Fields()) {
    if (Section(field.path) != section) {
      section = Section(field.path);
      absl::StrAppend(&page, "\n## ", section.empty() ? "The job" : section, "\n\n", kTableHead);
    }
    absl::StrAppend(&page, TableRow(field));
  }
  return page;
}

std::string PatternsPage() {
  std::string page = kPatternsPreamble;
  const auto append_table = [&page](std::string_view pattern, bool is_not) {
    std::string rows;
    for (const Field& field : Fields()) {
      if (field.when.path == "attention.pattern" && field.when.value == pattern &&
          field.when.is_not == is_not) {
        absl::StrAppend(&rows, TableRow(field));
      }
    }
    if (!rows.empty()) absl::StrAppend(&page, "\n", kTableHead, rows);
  };
  for (const patterns::PatternDefinition* definition : patterns::Definitions()) {
    absl::StrAppend(&page, "\n## ", std::string(definition->name), "\n\n",
                    std::string(definition->page));
    append_table(definition->name, /*is_not=*/false);
  }
  absl::StrAppend(&page, "\n## What all but dense have\n");
  append_table("dense", /*is_not=*/true);
  return absl::StrCat(page, kAddingAPattern);
}

std::string ReferenceSummary() {
  std::string text = "Fields of the job file (docs/job_file.md says more):\n";
  for (const Field& field : Fields()) {
    if (&field != FindField(field.path)) continue;
    std::string value(field.default_value);
    if (HasDefaultByPattern(field)) value = "by pattern";
    if (field.need == Need::kRequired) value = "required";
    absl::StrAppend(&text, absl::StrFormat("  %-30s %s\n", std::string(field.path),
                                           value.empty() ? "optional" : value));
  }
  return text;
}

}  // namespace ringleader::jobspec
