// What a job small enough for a test trains on: a Qwen2 model of two layers and a few thousand
// tokens of text. Without protobuf, for tests on either side.
#pragma once

#include <string>

namespace ringleader::trainer::testing {

inline constexpr int kTinySequence = 512;  // tokens

// config.json, tokens/train and tokens/eval in `directory`, unless they are there.
void WriteTinyFiles(const std::string& directory);

}  // namespace ringleader::trainer::testing
