// Looks where jobs' paths lead (--allow-path), beside the thread that asks: a mount that does not
// answer holds up that job's start, and neither the worker's heartbeats nor other jobs.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "ringleader/v1/worker_control.pb.h"

namespace ringleader::agent {

// Belongs to the thread on which `post` runs functions.
class PathChecks {
 public:
  using Post = std::function<void(std::function<void()>)>;
  using Done = std::function<void(const absl::Status&)>;

  // `roots`: below which jobs' paths lie.
  PathChecks(std::vector<std::string> roots, Post post);
  // `done` of what is still under way is never called.
  ~PathChecks();

  // There is something to look for. Without roots there is not: a job's paths may lie anywhere.
  bool any() const { return !roots_.empty(); }
  // Calls `done` later, on the thread of `post`: OK, PERMISSION_DENIED that names the path,
  // DEADLINE_EXCEEDED where it lies on a mount that does not answer, or RESOURCE_EXHAUSTED where so
  // many looks hang for the job's owner that there is none left for it.
  void Begin(const std::string& job, const v1::StartTrainers& start, Done done);

 private:
  struct Look {
    v1::JobSpec spec;
    Done done;
  };
  // Looks of one owner: WithTimeLimit() counts those that hang by the same name.
  struct Owner {
    int under_way = 0;
    std::deque<Look> waiting;
  };
  // What threads that outlive this object have of it; no `post`: nothing any more.
  struct Returns {
    absl::Mutex mutex;
    Post post ABSL_GUARDED_BY(mutex);
  };

  void BeginNext(const std::string& owner);
  void Run(const std::string& owner, Look look);
  void OnEnd(const std::string& owner, const Done& done, const absl::Status& status);

  const std::vector<std::string> roots_;
  const std::shared_ptr<Returns> returns_;
  std::map<std::string, Owner> owners_;
};

}  // namespace ringleader::agent
