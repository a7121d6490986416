// Jobs as people read them.
#pragma once

#include <iosfwd>
#include <string>

#include "base/clock.h"
#include "ringleader/v1/job.pb.h"

namespace ringleader::cli {

// "headers-16k" of "jobs/headers-16k".
std::string ShortName(const std::string& name);

// One row of `ringctl list`, and its heading; owner and project where some job has them.
std::vector<std::string> JobHeading(bool with_owner);
std::vector<std::string> JobRow(const v1::Job& job, const Clock& clock, bool with_owner);

// `ringctl get`; `columns` as in WriteColumns().
void WriteJob(std::ostream& out, const v1::Job& job, const Clock& clock, int columns);

// What changed in a running attempt's plan, and why; who holds others up.
std::string DescribeChange(const v1::PlanChange& change);
std::string DescribeSlowRank(const v1::SlowRank& slow);

// "FAILED at rank 2 on node-a: out of memory".
std::string DescribeFailure(const v1::Failure& failure);

}  // namespace ringleader::cli
