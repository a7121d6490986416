#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/str_format.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "worker/model/files/safetensors.h"

namespace ringleader::model {
namespace {

using Json = nlohmann::json;

// Knows only the types that weights come in; `where` names file and tensor.
absl::StatusOr<StoredType> ParseType(const Json& value, const std::string& where) {
  for (const StoredType type :
       {StoredType::kFloat32, StoredType::kBFloat16, StoredType::kFloat16}) {
    if (value.is_string() && value.get<std::string>() == StoredTypeName(type)) return type;
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: dtype is %s; supported: F32, BF16, F16", where,
                      value.dump(-1, ' ', false, Json::error_handler_t::replace).substr(0, 40)));
}

// One entry, checked on its own; whether entries fit together is checked when all are there.
absl::StatusOr<StoredTensor> ParseTensor(const std::string& name, const Json& entry,
                                         uint64_t data_bytes, const std::string& where) {
  if (!entry.is_object() || !entry.contains("dtype") || !entry.contains("shape") ||
      !entry.contains("data_offsets") || entry.size() != 3) {
    return absl::InvalidArgumentError(where +
                                      ": needs dtype, shape and data_offsets, nothing else");
  }
  StoredTensor tensor;
  tensor.name = name;
  ASSIGN_OR_RETURN(tensor.type, ParseType(entry["dtype"], where));

  const Json& shape = entry["shape"];
  // No weight has as many dimensions; the limit keeps a hostile header from growing the vector.
  if (!shape.is_array() || shape.size() > 8) {
    return absl::InvalidArgumentError(where + ": shape must be a list of at most 8 sizes");
  }
  uint64_t bytes = BytesPerElement(tensor.type);
  for (const Json& size : shape) {
    // No size may exceed the file, which also keeps the product below from overflowing unnoticed.
    if (!size.is_number_unsigned() || size.get<uint64_t>() > data_bytes ||
        __builtin_mul_overflow(bytes, size.get<uint64_t>(), &bytes)) {
      return absl::InvalidArgumentError(where + ": shape does not fit the file");
    }
    tensor.shape.push_back(size.get<int64_t>());
  }

  const Json& offsets = entry["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
      !offsets[1].is_number_unsigned()) {
    return absl::InvalidArgumentError(where + ": data_offsets must be two whole numbers");
  }
  tensor.begin = offsets[0].get<uint64_t>();
  tensor.end = offsets[1].get<uint64_t>();
  if (tensor.begin > tensor.end || tensor.end > data_bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: data_offsets [%d, %d) leave the file's %d bytes of data", where,
                        tensor.begin, tensor.end, data_bytes));
  }
  if (tensor.end - tensor.begin != bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: data_offsets hold %d bytes, its shape and dtype need %d", where,
                        tensor.end - tensor.begin, bytes));
  }
  return tensor;
}

absl::Status ParseMetadata(const Json& entry, const std::string& source,
                           std::map<std::string, std::string>& metadata) {
  if (!entry.is_object()) {
    return absl::InvalidArgumentError(source + ": __metadata__ must map strings to strings");
  }
  for (const auto& [key, value] : entry.items()) {
    if (!value.is_string()) {
      return absl::InvalidArgumentError(source + ": __metadata__ must map strings to strings");
    }
    metadata[key] = value.get<std::string>();
  }
  return absl::OkStatus();
}

}  // namespace

int64_t BytesPerElement(StoredType type) {
  return type == StoredType::kFloat32 ? 4 : 2;
}

std::string_view StoredTypeName(StoredType type) {
  switch (type) {
    case StoredType::kFloat32:
      return "F32";
    case StoredType::kBFloat16:
      return "BF16";
    case StoredType::kFloat16:
      return "F16";
  }
  return "";
}

int64_t StoredTensor::elements() const {
  return static_cast<int64_t>(end - begin) / BytesPerElement(type);
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view json, uint64_t data_bytes,
                                                         const std::string& source) {
  // nlohmann keeps the last of two equal keys; the format forbids them, so look while parsing.
  std::set<std::string> names;
  std::string repeated;
  const auto watch_keys = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth == 1 && event == Json::parse_event_t::key) {
      std::string name = parsed.get<std::string>();
      if (!names.insert(name).second) repeated = std::move(name);
    }
    return true;
  };
  const Json root = ParseJson(json, watch_keys);
  if (root.is_discarded() || !root.is_object()) {
    return absl::InvalidArgumentError(source + ": the header is not a JSON object");
  }
  if (!repeated.empty()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: tensor %s stands in the header twice", source, repeated));
  }

  SafetensorsHeader header;
  for (const auto& [name, entry] : root.items()) {
    if (name == "__metadata__") {
      RETURN_IF_ERROR(ParseMetadata(entry, source, header.metadata));
      continue;
    }
    ASSIGN_OR_RETURN(
        StoredTensor tensor,
        ParseTensor(name, entry, data_bytes, absl::StrFormat("%s: tensor %s", source, name)));
    header.tensors.push_back(std::move(tensor));
  }
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const StoredTensor& a, const StoredTensor& b) {
              return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
            });
  // Each tensor must start where the one before it ended, and the last end with the file.
  uint64_t end = 0;
  for (const StoredTensor& tensor : header.tensors) {
    if (tensor.begin != end) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: tensor %s starts at byte %d, %s the one before it ends at %d", source, tensor.name,
          tensor.begin, tensor.begin < end ? "overlapping:" : "leaving a gap:", end));
    }
    end = tensor.end;
  }
  if (end != data_bytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: its tensors hold %d bytes, the file has %d", source, end, data_bytes));
  }
  return header;
}

}  // namespace ringleader::model
