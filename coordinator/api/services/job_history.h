// What a job's steps came to, thinned out for charts.
#pragma once

#include "absl/status/status.h"
#include "coordinator/store/store.h"
#include "ringleader/v1/job_service.pb.h"

namespace ringleader::api {

// NOT_FOUND for a job that there is not, INVALID_ARGUMENT for more points than are given out. What
// it costs does not depend on how many steps the job has done.
absl::Status ReadJobHistory(store::ReadTransaction& transaction,
                            const v1::GetJobHistoryRequest& request, v1::JobHistory* history);

}  // namespace ringleader::api
