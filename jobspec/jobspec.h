// The job file: YAML to ringleader.v1.JobSpec and back, its defaults and its limits.
// docs/job_file.md lists every field. All functions are pure but for CheckFiles and LoadJobFile,
// and thread-safe.
//
// Errors are INVALID_ARGUMENT unless stated; each is one line that names the field by its path
// ("attention.vertical_mass"), its value, and what is allowed. Of several the message has their
// number and a line each, 20 at most.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model_shape/model_config.h"
#include "ringleader/v1/job_spec.pb.h"

namespace ringleader::jobspec {

struct ParseOptions {
  // "path=value" each, applied in order after the file; "path=" restores the default. One that
  // changes what other fields go with drops fields of the file that no longer fit.
  std::vector<std::string> overrides = {};
  // Relative paths in the file and in overrides are taken from here; empty leaves them as they are.
  std::string base_directory = {};
  // Named in errors, with the line.
  std::string file_name = "job file";
};

// Checks syntax, field names and types: what is not set stays unset. Unknown and repeated fields
// are errors. Takes any bytes, up to 256 KiB.
absl::StatusOr<v1::JobSpec> ParseJobFile(std::string_view yaml, const ParseOptions& options);

// Reads and parses `path`; relative paths in it are taken from its folder. NOT_FOUND without it.
// An error of a field comes with what Validate() would say of the others.
absl::StatusOr<v1::JobSpec> LoadJobFile(const std::string& path,
                                        const std::vector<std::string>& overrides);

// Fills in every optional field that is unset and that fits the specification's pattern and
// schedule. Idempotent.
void ApplyDefaults(v1::JobSpec* spec);

// Everything that can be checked without looking at files: ranges, names, fields that do not fit
// the pattern, trainers = context * data, how the sequence divides. Defaults may be filled in or
// not. Paths must be absolute. With the `model` that the specification names, where it is known(),
// also what CheckModel() says.
absl::Status Validate(const v1::JobSpec& spec, const model::ModelConfig& model = {});

// Whether a valid specification goes with the model that it names: heads, layers, precision. Where
// that is not known() it does. Whoever makes a job or a plan asks, so that none is made that no
// plan could be made for.
absl::Status CheckModel(const v1::JobSpec& spec, const model::ModelConfig& model);

// Checks that this program knows every enumerator: those of a newer program arrive as numbers.
// Validate checks it, too; who takes a specification without validating it asks here.
absl::Status CheckEnumerators(const v1::JobSpec& spec);

// The files that the specification names, on this machine: the model's config.json and weights, the
// manifests of the token shards, the checkpoint folder if it exists. NOT_FOUND or
// FAILED_PRECONDITION.
absl::Status CheckFiles(const v1::JobSpec& spec);

// The specification as a job file; only what is set. ParseJobFile gives the same message back.
std::string ToYaml(const v1::JobSpec& spec);

// The same with every field that fits, whether it is set or not: `auto` and `[]` where a default
// leaves something open. `notes`, by path, follow fields as comments; a note may hold what
// others wrote.
std::string ToCompleteYaml(const v1::JobSpec& spec,
                           const std::map<std::string, std::string>& notes);

// The job file's name for an enumerator: "striped"; "auto" where it is unset, the number of one
// that this program does not know.
std::string EnumText(v1::ParallelismSpec::Layout value);
std::string EnumText(v1::ParallelismSpec::Ring value);

}  // namespace ringleader::jobspec
