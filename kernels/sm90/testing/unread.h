// Pointers for calls that are refused before anything is read.
#pragma once

#include <cstddef>

namespace ringleader::kernels::sm90 {

// Aligned to 256 bytes, plus `offset`.
template <typename T>
T* Unread(size_t offset = 0) {
  alignas(256) static std::byte memory[512];
  return reinterpret_cast<T*>(memory + offset);
}

}  // namespace ringleader::kernels::sm90
