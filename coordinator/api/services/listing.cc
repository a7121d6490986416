#include "coordinator/api/services/listing.h"

#include <openssl/sha.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "ringleader/v1/job.pb.h"

namespace ringleader::api {
namespace {

constexpr size_t kTokenFingerprint = 16;
constexpr size_t kMaxFilterBytes = 4096;
constexpr size_t kMaxTerms = 8;  // each looks at every job

class FilterParser {
 public:
  explicit FilterParser(std::string_view text) : text_(text) {}

  absl::StatusOr<std::vector<store::JobTerm>> Parse() {
    std::vector<store::JobTerm> terms;
    SkipSpace();
    while (at_ < text_.size()) {
      if (!terms.empty()) {
        const size_t start = at_;
        if (Word() != "AND") return Error(start, "expected AND");
        SkipSpace();
      }
      if (terms.size() == kMaxTerms) {
        return absl::InvalidArgumentError(
            absl::StrFormat("filter: more than %d terms; ask for less, and leave out what is not "
                            "wanted of the reply",
                            kMaxTerms));
      }
      ASSIGN_OR_RETURN(store::JobTerm term, Term());
      terms.push_back(std::move(term));
      SkipSpace();
    }
    return terms;
  }

 private:
  absl::StatusOr<store::JobTerm> Term() {
    store::JobTerm term;
    const size_t start = at_;
    const std::string_view field = Word();
    if (field == "state") {
      term.field = store::JobTerm::Field::kState;
    } else if (field == "name") {
      term.field = store::JobTerm::Field::kName;
    } else if (field == "owner") {
      term.field = store::JobTerm::Field::kOwner;
    } else if (field == "project") {
      term.field = store::JobTerm::Field::kProject;
    } else if (field.size() > kLabelPrefix.size() &&
               field.substr(0, kLabelPrefix.size()) == kLabelPrefix) {
      term.field = store::JobTerm::Field::kLabel;
      term.label = std::string(field.substr(kLabelPrefix.size()));
    } else {
      return Error(start, "expected state, name, owner, project or labels.KEY");
    }
    SkipSpace();
    RETURN_IF_ERROR(Operator(term));
    SkipSpace();
    return Value(std::move(term));
  }

  absl::Status Operator(store::JobTerm& term) {
    const std::string_view rest = text_.substr(at_);
    if (rest.substr(0, 2) == "!=") {
      term.op = store::JobTerm::Operator::kNotEquals;
      at_ += 2;
    } else if (rest.substr(0, 1) == "=") {
      term.op = store::JobTerm::Operator::kEquals;
      at_ += 1;
    } else if (rest.substr(0, 1) == ":" && term.field == store::JobTerm::Field::kLabel) {
      term.op = store::JobTerm::Operator::kHas;
      at_ += 1;
    } else {
      return Error(at_, term.field == store::JobTerm::Field::kLabel ? "expected =, != or :"
                                                                    : "expected = or !=");
    }
    return absl::OkStatus();
  }

  absl::StatusOr<store::JobTerm> Value(store::JobTerm term) {
    const size_t start = at_;
    if (term.op == store::JobTerm::Operator::kHas) {
      if (at_ < text_.size() && text_[at_] == '*') {
        ++at_;
        return term;
      }
      return Error(start, "expected * behind \":\"");
    }
    if (at_ < text_.size() && text_[at_] == '"') {
      ASSIGN_OR_RETURN(term.value, Quoted());
    } else {
      term.value = std::string(Word());
      if (term.value.empty()) return Error(start, "expected a value");
    }
    v1::Job::State state;
    if (term.field == store::JobTerm::Field::kState && !v1::Job::State_Parse(term.value, &state)) {
      return Error(
          start,
          "no such job state; states are PENDING, STARTING, RUNNING, UNKNOWN, RETRYING, PAUSING, "
          "PAUSED, CANCELLING, CANCELLED, SUCCEEDED and FAILED");
    }
    return term;
  }

  absl::StatusOr<std::string> Quoted() {
    const size_t start = at_++;
    std::string value;
    while (at_ < text_.size() && text_[at_] != '"') {
      if (text_[at_] == '\\' && at_ + 1 < text_.size()) ++at_;
      value.push_back(text_[at_++]);
    }
    if (at_ >= text_.size()) return Error(start, "the quote is not closed");
    ++at_;
    return value;
  }

  std::string_view Word() {
    const size_t start = at_;
    while (at_ < text_.size() &&
           (absl::ascii_isalnum(static_cast<unsigned char>(text_[at_])) || text_[at_] == '-' ||
            text_[at_] == '_' || text_[at_] == '.' || text_[at_] == '/')) {
      ++at_;
    }
    return text_.substr(start, at_ - start);
  }

  void SkipSpace() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }

  static absl::Status Error(size_t at, const char* what) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "filter: at character %d: %s (example: state=RUNNING AND labels.team=ocean)", at + 1,
        what));
  }

  const std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

absl::StatusOr<int> PageSize(int32_t requested) {
  if (requested < 0) return absl::InvalidArgumentError("page_size: must not be negative");
  return requested == 0 ? kDefaultPageSize : std::min(requested, kMaxPageSize);
}

std::string MakePageToken(std::string_view place, std::string_view arguments) {
  std::string token = Fingerprint(arguments).substr(0, kTokenFingerprint);
  token.append(place);
  return absl::WebSafeBase64Escape(token);
}

absl::StatusOr<std::string> ParsePageToken(std::string_view token, std::string_view arguments) {
  if (token.empty()) return std::string();
  std::string plain;
  if (!absl::WebSafeBase64Unescape(absl::string_view(token.data(), token.size()), &plain) ||
      plain.size() < kTokenFingerprint) {
    return absl::InvalidArgumentError("page_token: not one that this method gave out");
  }
  if (plain.substr(0, kTokenFingerprint) != Fingerprint(arguments).substr(0, kTokenFingerprint)) {
    return absl::InvalidArgumentError(
        "page_token: the filter differs from that of the page before; repeat it, or begin without "
        "a token");
  }
  return plain.substr(kTokenFingerprint);
}

absl::StatusOr<std::vector<store::JobTerm>> ParseJobFilter(std::string_view filter) {
  if (filter.size() > kMaxFilterBytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("filter: longer than %d bytes", kMaxFilterBytes));
  }
  return FilterParser(filter).Parse();
}

std::string Fingerprint(std::string_view bytes) {
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest);
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest), sizeof(digest)));
}

}  // namespace ringleader::api
