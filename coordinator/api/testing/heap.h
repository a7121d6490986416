// What this process's heaps hold.
#pragma once

#include <malloc.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace ringleader::api::testing {

// Returns the bytes of all threads' heaps, as malloc_info() sums them up at its end.
inline size_t BytesInUse() {
  char* text = nullptr;
  size_t length = 0;
  std::FILE* const file = open_memstream(&text, &length);
  malloc_info(0, file);
  std::fclose(file);
  const std::string report(text, length);
  std::free(text);
  const auto size = [&](const std::string& element) {
    const size_t at = report.find("size=\"", report.rfind(element)) + 6;
    return std::stoull(report.substr(at));
  };
  return size("<system type=\"current\"") + size("<total type=\"mmap\"") -
         size("<total type=\"fast\"") - size("<total type=\"rest\"");
}

}  // namespace ringleader::api::testing
