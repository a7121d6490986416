// Where a job's files may lie: below folders that an operator names (--allow-path).
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ringleader/v1/job_spec.pb.h"

namespace CLI {
class App;
}

namespace ringleader::jobspec {

// --allow-path. `roots` must outlive the parse.
void AddRootFlag(CLI::App& app, std::vector<std::string>* roots);

// INVALID_ARGUMENT unless each is an absolute path without "..".
absl::Status CheckRoots(const std::vector<std::string>& roots);

// kText: paths as they are written, for a machine that does not see the files. kFiles: also where
// they lead to here, past symbolic links.
enum class RootCheck { kText, kFiles };

// Every path of the specification lies below one of `roots`; no roots, no limits. PERMISSION_DENIED
// names the field. A link that is set after the check is not seen: whoever starts a job checks
// again, last.
absl::Status CheckPaths(const v1::JobSpec& spec, const std::vector<std::string>& roots,
                        RootCheck check);

}  // namespace ringleader::jobspec
