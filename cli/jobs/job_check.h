// A job file with everything in it that can be looked at here, before anybody is asked.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "model_shape/model_config.h"
#include "ringleader/v1/job_spec.pb.h"

namespace ringleader::cli {

struct JobFile {
  std::string path;
  std::vector<std::string> overrides;  // path=value
  bool check_files = true;             // the job's files are on this machine, too
};

struct CheckedJob {
  v1::JobSpec spec;          // as it was written, without defaults
  model::ModelConfig model;  // not known() unless files were looked at
};

// Reads and checks a job file and, where they are to be found here, what it names, as trainers do
// when they begin: the model's architecture, whether its heads, layers and widths are what
// the job asks for, the files that go with its export, the vocabulary and length of the tokens, the
// folder of checkpoints. All that is wrong comes at once; the code is that of the first.
absl::StatusOr<CheckedJob> CheckJob(const JobFile& file);

}  // namespace ringleader::cli
