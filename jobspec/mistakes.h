// What is wrong with a job file, gathered so that a user sees all of it at once.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "model_shape/model_config.h"
#include "ringleader/v1/job_spec.pb.h"

namespace ringleader::jobspec {

class Mistakes {
 public:
  // `path`: of the field or section that is wrong; `line`: what the user reads.
  void Add(std::string_view path, std::string_view line);
  // The same of a check's outcome, unless it is OK.
  void Add(std::string_view path, const absl::Status& outcome);

  // Nobody reads more: whoever finds mistakes may stop.
  bool full() const { return found_.size() >= kMost; }
  bool Has(std::string_view path) const;
  // Whether one of the paths, or what lies below it ("training" of "training.steps"), is wrong.
  bool Touch(std::initializer_list<std::string_view> paths) const;

  // OK without any; else INVALID_ARGUMENT: the line of one, or their number and a line each.
  absl::Status status() const;
  // What status() says, in the order in which it was found.
  std::vector<std::string> lines() const;

 private:
  static constexpr size_t kMost = 20;

  struct Mistake {
    std::string path;
    std::string line;
  };
  std::vector<Mistake> found_;
};

// What jobspec::Validate() finds. A path that is wrong already is not looked at again, nor what
// depends on it.
void FindMistakes(const v1::JobSpec& spec, Mistakes* mistakes,
                  const model::ModelConfig& model = {});

// What of the specification does not go with the `model` that it names, of fields that are not
// wrong by themselves; nothing where that is not known(). Defaults may be filled in or not.
void FindModelMistakes(const v1::JobSpec& spec, const model::ModelConfig& model,
                       Mistakes* mistakes);

}  // namespace ringleader::jobspec
