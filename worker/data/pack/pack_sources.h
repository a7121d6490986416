// The files that a pack reads.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/data/pack/pack_folder.h"

namespace ringleader::data {

inline constexpr char kMarksSuffix[] = ".marks";

// A document: what is read, and the name that decides on its order and its share.
struct Source {
  std::string name;  // relative to the path that the user gave
  std::filesystem::path file;
  bool is_named = false;    // by the user, himself
  bool is_link = false;     // within a folder
  size_t input = 0;         // which of the user's paths led here
  std::string target = {};  // the same of all paths to a file
  // Of equal names below several inputs, by their whole paths.
  bool operator<(const Source& other) const {
    return std::tie(name, file) < std::tie(other.name, other.file);
  }
};

// What the user's paths lead to, each file once, in the order of their names. `result` counts what
// does not become a source.
absl::StatusOr<std::vector<Source>> FindSources(const PackOptions& options, PackResult* result);

}  // namespace ringleader::data
