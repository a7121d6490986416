// Where a job's files may lie: below folders that an operator names (--allow-path).
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/net/address.h"
#include "ringleader/v1/job_spec.pb.h"

namespace CLI {
class App;
}

namespace ringleader::jobspec {

// --allow-path. `roots` must outlive the parse.
void AddRootFlag(CLI::App& app, std::vector<std::string>* roots);

// INVALID_ARGUMENT unless each is an absolute path without ".." and control characters.
absl::Status CheckRoots(const std::vector<std::string>& roots);

// FAILED_PRECONDITION where there are none, although other machines reach the coordinator at
// `address`: jobs are other people's then, and where they may read and write has to be said. "/"
// says anywhere.
absl::Status CheckRootsGiven(const std::vector<std::string>& roots, const Address& address);

// kText: paths as they are written, for a machine that does not see the files. kFiles: also where
// they lead to here, past symbolic links, and where the links lead that lie in the folders.
enum class RootCheck { kText, kFiles };

// Every path of the specification lies below one of `roots`; no roots, no limits. PERMISSION_DENIED
// names the field. A link that is set after the check is not seen: whoever starts a job checks
// again, last.
absl::Status CheckPaths(const v1::JobSpec& spec, const std::vector<std::string>& roots,
                        RootCheck check);

}  // namespace ringleader::jobspec
