// Reader and writer of single safetensors files: an 8-byte header length, a JSON header, then the
// tensors' bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ringleader::model {

enum class StoredType { kFloat32, kBFloat16, kFloat16 };

int64_t BytesPerElement(StoredType type);
std::string_view StoredTypeName(StoredType type);  // "F32", "BF16", "F16"

struct StoredTensor {
  std::string name;
  StoredType type = StoredType::kFloat32;
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  // bytes, from the start of the data section
  int64_t elements() const;
};

struct SafetensorsHeader {
  std::vector<StoredTensor> tensors;  // by rising offset
  std::map<std::string, std::string> metadata;
};

// Parses the JSON header of a file whose data section has `data_bytes`. Strict: tensors tile the
// data section without gap or overlap, shapes fit the byte ranges, types are F32, BF16 or F16, no
// name occurs twice. INVALID_ARGUMENT names the tensor; `source` starts every message.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view json, uint64_t data_bytes,
                                                         const std::string& source);

// A mapped file. Its tensors stay readable as long as it lives; immutable, so any thread may read.
class SafetensorsFile {
 public:
  // DATA_LOSS if the file is not whole or its checksum (kChecksumKey) does not match; NOT_FOUND if
  // it cannot be opened.
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Open(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  const SafetensorsHeader& header() const { return header_; }
  std::span<const std::byte> Bytes(const StoredTensor& tensor) const;

  // Converts to fp32. INVALID_ARGUMENT if `out` has another number of elements; DATA_LOSS naming
  // the tensor if a value is NaN or infinite.
  absl::Status ReadFloats(const StoredTensor& tensor, std::span<float> out) const;

 private:
  SafetensorsFile() = default;

  std::string path_;
  SafetensorsHeader header_;
  const std::byte* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  size_t data_offset_ = 0;
};

// Metadata key under which our files carry the XXH3-64 of their data section, in hexadecimal.
inline constexpr char kChecksumKey[] = "ringleader.xxh3_64";

struct TensorSource {
  std::string name;
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;
  StoredType type = StoredType::kFloat32;
};

// Rounds `values` to bf16, to the nearest and to even, into the front of their own memory: what it
// returns. DATA_LOSS, naming the element, if one is not finite in bf16.
absl::StatusOr<std::span<const std::byte>> PackBFloat16(std::span<float> values);

// Writes `tensors` in this order, with a checksum, and syncs the file to disk. On an error
// (RESOURCE_EXHAUSTED when the disk is full) the file is removed.
absl::Status WriteSafetensors(const std::string& path, const std::vector<TensorSource>& tensors);

}  // namespace ringleader::model
