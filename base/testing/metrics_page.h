#pragma once

#include <cstdio>
#include <string>

namespace ringleader {

// http://`address`/metrics as Prometheus reads it; empty where nobody answers.
inline std::string MetricsPage(const std::string& address) {
  std::string page;
  FILE* const pipe = popen(("curl -sf http://" + address + "/metrics").c_str(), "r");
  if (pipe == nullptr) return page;
  char buffer[4096];
  while (const size_t bytes = fread(buffer, 1, sizeof(buffer), pipe)) page.append(buffer, bytes);
  pclose(pipe);
  return page;
}

}  // namespace ringleader
