// What the states of jobs, attempts and ranks mean to whoever waits for them.
#pragma once

#include "ringleader/v1/job.pb.h"

namespace ringleader {

// The job has ended and will not run again.
inline bool IsTerminal(v1::Job::State state) {
  return state == v1::Job::CANCELLED || state == v1::Job::SUCCEEDED || state == v1::Job::FAILED;
}

// The attempt's outcome is open.
inline bool IsLive(v1::Attempt::State state) {
  return state == v1::Attempt::STARTING || state == v1::Attempt::RUNNING ||
         state == v1::Attempt::UNKNOWN || state == v1::Attempt::STOPPING;
}

}  // namespace ringleader
