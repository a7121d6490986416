// What the log says of workers whose words do not count.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"

namespace ringleader::lifecycle {

// However much a worker says that is wrong, the log gets a line a second of it for each reason: the
// first, and how many more there were. Lines are kept until they are asked for, for a log that
// blocks is to hold up nobody's transaction.
class Warnings {
 public:
  enum class Reason {
    kNoJobsName,      // of a job that cannot be
    kNotItsOwn,       // a report of what the node cannot know
    kDamagedRecord,   // a report of an attempt whose record is damaged
    kForeignCommand,  // another node's command acknowledged
    kNotBelieved,     // measurements
    kStray,           // an attempt that was given up
  };

  // `text` is asked for where it is the first.
  void Add(const std::string& node, Reason reason, absl::FunctionRef<std::string()> text);

  // The lines to write by now; not the same again.
  std::vector<std::string> Take(absl::Time now);

 private:
  struct Kept {
    std::string first;
    uint64_t count = 0;  // that no line has told of
    absl::Time next = absl::InfinitePast();
  };
  std::map<std::pair<std::string, Reason>, Kept> kept_;
};

}  // namespace ringleader::lifecycle
