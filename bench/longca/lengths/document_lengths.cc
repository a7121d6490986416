#include "bench/longca/lengths/document_lengths.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/files.h"
#include "base/numbers/split_mix.h"
#include "base/status_macros.h"

namespace ringleader::bench {
namespace {

// A generator that is as short in Python.
class SplitMix {
 public:
  explicit SplitMix(uint64_t seed) : state_(seed) {}
  double Unit() {  // [0, 1)
    const uint64_t draw = SplitMix64(state_);
    state_ += kSplitMixStep;
    return static_cast<double>(draw >> 11) * 0x1.0p-53;
  }

 private:
  uint64_t state_;
};

}  // namespace

absl::StatusOr<DocumentLengths> DocumentLengths::OfHistogram(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadRegularFile(path, 1 << 20));
  const auto shares = nlohmann::ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!shares.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is no JSON object of shares by bins, such as \"[32,64)\": 0.06"));
  }
  DocumentLengths lengths;
  lengths.bins_.clear();
  lengths.of_tokens_ = 0;
  lengths.name_ = std::filesystem::path(path).stem().string();
  double sum = 0;
  for (const auto& [bin, share] : shares.items()) {
    unsigned long low = 0, high = 0;
    int read = 0;
    std::sscanf(bin.c_str(), "[%9lu,%9lu)%n", &low, &high, &read);
    const double of_all = share.is_number() ? share.get<double>() : -1;
    if (read == 0 || bin.size() != static_cast<size_t>(read) || low >= high ||
        !std::isfinite(of_all) || of_all < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": \"", bin,
                       "\": ", share.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace),
                       " is no share of a bin such as \"[32,64)\": 0.06"));
    }
    sum += of_all;
    lengths.bins_.push_back(
        {.low = std::max(1.0, static_cast<double>(low)),  // a document has a token
         .high = static_cast<double>(high),
         .until = sum});
  }
  if (!(sum > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " has no bins with a share, such as \"[32,64)\": 0.06"));
  }
  return lengths;
}

std::vector<int32_t> DocumentLengths::Firsts(int64_t tokens, uint64_t seed) const {
  const double scale = of_tokens_ > 0 ? static_cast<double>(tokens) / of_tokens_ : 1.0;
  SplitMix random(seed);
  std::vector<int32_t> firsts;
  for (int64_t first = 0; first < tokens;) {
    firsts.push_back(static_cast<int32_t>(first));
    const double place = random.Unit() * bins_.back().until;
    const auto bin = std::ranges::upper_bound(bins_, place, {}, &Bin::until);
    const double length = bin->low * std::pow(bin->high / bin->low, random.Unit()) * scale;
    first += std::max<int64_t>(1, static_cast<int64_t>(length));
  }
  return firsts;
}

}  // namespace ringleader::bench
