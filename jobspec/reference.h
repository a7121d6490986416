// The job file's reference, written from the table of fields.
#pragma once

#include <string>

namespace ringleader::jobspec {

// docs/job_file.md, whole.
std::string ReferencePage();

// One line a field, for `ringctl submit --help`.
std::string ReferenceSummary();

}  // namespace ringleader::jobspec
