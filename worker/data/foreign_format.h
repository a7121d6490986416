// Files of other tools, which packed as they are would train on their braces and headers.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace ringleader::data {

// INVALID_ARGUMENT says what the file is and what to do instead: for lines of JSON, Parquet,
// NumPy's arrays, Megatron's indexed data sets and compressed files. `path`: told to people, and
// looked at for a file beside it; `content`: its first part at least. `is_text`: numbers may begin
// as a gzip file does, whose name has to say so, too.
absl::Status RefuseForeignFormat(const std::string& path, std::string_view content, bool is_text);

}  // namespace ringleader::data
