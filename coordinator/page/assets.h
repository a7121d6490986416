// The files of the page (assets/), which the build puts into the program.
#pragma once

#include <string_view>
#include <vector>

namespace ringleader::page {

struct Asset {
  const char* path;  // e.g. "/page.js"
  const char* type;  // its MIME type
  std::string_view text;
};

const std::vector<Asset>& Assets();

}  // namespace ringleader::page
