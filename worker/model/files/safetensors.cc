#include "worker/model/files/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/checksum.h"
#include "base/files.h"
#include "base/status_macros.h"

namespace ringleader::model {
namespace {

constexpr size_t kLengthBytes = 8;
constexpr uint64_t kLargestHeader =
    100'000'000;  // bytes; the limit of the reference implementation

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

float FromBFloat16(uint16_t bits) {
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

float FromFloat16(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t exponent = (bits >> 10) & 0x1f, mantissa = bits & 0x3ff;
  if (exponent == 0) {  // zero and subnormal: mantissa * 2^-24
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 31 ? 255 : exponent + 112;
  return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
}

std::string Hex(uint64_t checksum) {
  return absl::StrFormat("%016x", checksum);
}

absl::Status Failed(const char* what, const std::string& path) {
  return FileError(errno, absl::StrCat(what, " ", path));
}

// Foreign files have no checksum; theirs is trusted, but for what ReadFloats checks.
absl::Status VerifyChecksum(const SafetensorsHeader& header, const std::byte* data, size_t bytes,
                            const std::string& path) {
  const auto it = header.metadata.find(kChecksumKey);
  if (it == header.metadata.end() || it->second == Hex(Checksum(data, bytes)))
    return absl::OkStatus();
  return absl::DataLossError(
      absl::StrFormat("%s: damaged: its data does not match the checksum in its header; restore "
                      "the file from a copy",
                      path));
}

}  // namespace

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(const std::string& path) {
  // A pipe in its place is opened without waiting for its other end.
  const int fd = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return Failed("open", path);
  const absl::Cleanup close_fd = [fd] { close(fd); };
  struct stat info {};
  if (fstat(fd, &info) != 0) return Failed("stat", path);
  if (!S_ISREG(info.st_mode)) return absl::InvalidArgumentError(path + ": not a regular file");
  const auto file_bytes = static_cast<size_t>(info.st_size);
  if (file_bytes < kLengthBytes) {
    return absl::DataLossError(absl::StrFormat(
        "%s: %d bytes are too few for a safetensors file; it is cut off", path, file_bytes));
  }
  void* mapping = mmap(nullptr, file_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
  if (mapping == MAP_FAILED) return Failed("map", path);

  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile());
  file->path_ = path;
  file->mapping_ = static_cast<const std::byte*>(mapping);
  file->mapping_bytes_ = file_bytes;
  // The length comes from the file: it must be checked against the file before it is used.
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, mapping, kLengthBytes);
  if (header_bytes > kLargestHeader || header_bytes > file_bytes - kLengthBytes) {
    return absl::DataLossError(absl::StrFormat(
        "%s: header of %d bytes in a file of %d; it is cut off or not a safetensors file", path,
        header_bytes, file_bytes));
  }
  file->data_offset_ = kLengthBytes + header_bytes;
  const std::string_view json(reinterpret_cast<const char*>(file->mapping_) + kLengthBytes,
                              header_bytes);
  const uint64_t data_bytes = file_bytes - file->data_offset_;
  absl::StatusOr<SafetensorsHeader> header = ParseSafetensorsHeader(json, data_bytes, path);
  // Whatever the header's fault, the file is not what was written.
  if (!header.ok()) return absl::DataLossError(header.status().message());
  file->header_ = *std::move(header);
  RETURN_IF_ERROR(
      VerifyChecksum(file->header_, file->mapping_ + file->data_offset_, data_bytes, path));
  return file;
}

SafetensorsFile::~SafetensorsFile() {
  munmap(const_cast<std::byte*>(mapping_), mapping_bytes_);
}

std::span<const std::byte> SafetensorsFile::Bytes(const StoredTensor& tensor) const {
  return {mapping_ + data_offset_ + tensor.begin, tensor.end - tensor.begin};
}

absl::Status SafetensorsFile::ReadFloats(const StoredTensor& tensor, std::span<float> out) const {
  if (static_cast<int64_t>(out.size()) != tensor.elements()) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: tensor %s has %d elements, not %d",
                                                      path_, tensor.name, tensor.elements(),
                                                      out.size()));
  }
  const std::byte* bytes = Bytes(tensor).data();
  if (tensor.type == StoredType::kFloat32) {
    std::memcpy(out.data(), bytes, out.size_bytes());
  } else {
    const auto convert = tensor.type == StoredType::kBFloat16 ? FromBFloat16 : FromFloat16;
    for (size_t i = 0; i < out.size(); ++i) {
      uint16_t half = 0;
      std::memcpy(&half, bytes + 2 * i, 2);  // the data section need not be aligned
      out[i] = convert(half);
    }
  }
  // One NaN in a weight is a NaN in every loss: better said here, with the tensor's name.
  for (size_t i = 0; i < out.size(); ++i) {
    if (!std::isfinite(out[i])) {
      return absl::DataLossError(
          absl::StrFormat("%s: tensor %s holds %g at element %d", path_, tensor.name, out[i], i));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::span<const std::byte>> PackBFloat16(std::span<float> values) {
  auto* const packed = reinterpret_cast<std::byte*>(values.data());
  for (size_t i = 0; i < values.size(); ++i) {
    const auto bits = std::bit_cast<uint32_t>(values[i]);
    const auto half = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    if (!std::isfinite(values[i]) || !std::isfinite(FromBFloat16(half))) {
      return absl::DataLossError(
          absl::StrFormat("%g at element %d is not finite in bf16", values[i], i));
    }
    // Goes after what is still to be read, but for the first, which has been.
    std::memcpy(packed + 2 * i, &half, sizeof(half));
  }
  return std::span<const std::byte>(packed, 2 * values.size());
}

absl::Status WriteSafetensors(const std::string& path, const std::vector<TensorSource>& tensors) {
  nlohmann::ordered_json header;
  // The header comes first and holds the checksum, so the data is read twice; it is in memory
  // anyway.
  ChecksumStream checksum;
  for (const TensorSource& tensor : tensors) {
    checksum.Update(tensor.bytes.data(), tensor.bytes.size());
  }
  // "format": what transformers asks of a file before it reads it.
  header["__metadata__"] = {{"format", "pt"}, {kChecksumKey, Hex(checksum.Digest())}};
  uint64_t end = 0;
  for (const TensorSource& tensor : tensors) {
    const uint64_t begin = end;
    end += tensor.bytes.size();
    header[tensor.name] = {{"dtype", StoredTypeName(tensor.type)},
                           {"shape", tensor.shape},
                           {"data_offsets", {begin, end}}};
  }
  std::string json = header.dump();
  json.append((8 - json.size() % 8) % 8, ' ');  // aligns the data section

  const uint64_t length = json.size();
  std::vector<std::span<const std::byte>> pieces = {std::as_bytes(std::span(&length, 1)),
                                                    std::as_bytes(std::span(json))};
  for (const TensorSource& tensor : tensors) pieces.push_back(tensor.bytes);
  return WriteFileAtomically(path, pieces);
}

}  // namespace ringleader::model
