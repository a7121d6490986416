#include "coordinator/lifecycle/reports/warnings.h"

#include "absl/strings/str_format.h"
#include "jobspec/fields/text.h"

namespace ringleader::lifecycle {
namespace {

constexpr absl::Duration kBetweenLines = absl::Seconds(1);
constexpr size_t kMostLineBytes = 4096;

}  // namespace

void Warnings::Add(const std::string& node, Reason reason, absl::FunctionRef<std::string()> text) {
  Kept& kept = kept_[{node, reason}];
  if (kept.count++ == 0) kept.first = jobspec::Shortened(text(), kMostLineBytes);
}

std::vector<std::string> Warnings::Take(absl::Time now) {
  std::vector<std::string> lines;
  for (auto& [key, kept] : kept_) {
    if (kept.count == 0 || now < kept.next) continue;
    lines.push_back(kept.count == 1
                        ? kept.first
                        : absl::StrFormat("%s (and %d more like it)", kept.first, kept.count - 1));
    kept = {.first = {}, .count = 0, .next = now + kBetweenLines};
  }
  std::erase_if(kept_, [now](const auto& entry) {
    return entry.second.count == 0 && now >= entry.second.next;
  });
  return lines;
}

}  // namespace ringleader::lifecycle
