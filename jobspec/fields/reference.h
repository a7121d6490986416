// The job file's and the patterns' reference, written from the table of fields.
#pragma once

#include <string>

namespace ringleader::jobspec {

// docs/job_file.md, whole.
std::string ReferencePage();

// docs/patterns.md, whole, from the patterns' definitions.
std::string PatternsPage();

// One line a field, for `ringctl submit --help`.
std::string ReferenceSummary();

}  // namespace ringleader::jobspec
