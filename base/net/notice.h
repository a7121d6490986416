// What a coordinator that is in trouble adds to every reply, for people to read.
#pragma once

namespace ringleader {

// Key of the trailing metadata: a sentence of printable ASCII, C-escaped.
inline constexpr char kNoticeKey[] = "ringleader-notice";

}  // namespace ringleader
