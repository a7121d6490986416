#include "coordinator/access/gate.h"

#include <grpcpp/server_context.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/net/token.h"
#include "base/status_macros.h"
#include "base/wait/timed_wait.h"
#include "coordinator/access/method_table.h"

namespace ringleader::access {
namespace {

constexpr absl::Duration kLookInterval = absl::Seconds(1);
constexpr char kBearer[] = "bearer ";
constexpr size_t kMaxAgentBytes = 100;

std::string Text(grpc::string_ref text) {
  return std::string(text.data(), text.size());
}

std::string Header(const grpc::AuthMetadataProcessor::InputMetadata& metadata, const char* name) {
  const auto found = metadata.find(name);
  return found == metadata.end() ? "" : Text(found->second);
}

absl::Status CheckRoles(const GateOptions& options, const AccessFile& file) {
  const std::string address = FormatAddress(options.listen);
  if (options.access_path.empty()) {
    if (IsLoopback(options.listen)) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        "--listen ", address,
        " can be reached from other machines, and nothing says who may do what: give --access FILE "
        "(docs/security.md shows one), or listen on loopback"));
  }
  if (options.tls.enabled() || file.plain_text_is_admin()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "--listen ", address,
      " speaks plain text, where nobody can show who they are, so that the roles in ",
      options.access_path,
      " mean nothing: give --tls-cert, --tls-key and --tls-ca, or write \"plain_text_is_admin: "
      "true\" into it to let whoever reaches the port do everything"));
}

absl::Time ExpiryOf(const v1::Token& token) {
  return absl::FromUnixSeconds(token.expire_time().seconds());
}

grpc::Status ToGrpc(const absl::Status& status) {
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

}  // namespace

Gate::Gate(GateOptions options, store::Store* store, AuditLog* audit, const Clock* clock)
    : options_(std::move(options)),
      voucher_(NewToken()),
      store_(*store),
      audit_(*audit),
      clock_(*clock) {}

Gate::~Gate() {
  StopWatching();
}

void Gate::StopWatching() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (watcher_.joinable()) watcher_.join();
}

absl::Status Gate::Load() {
  if (options_.access_path.empty()) {
    RETURN_IF_ERROR(CheckRoles(options_, AccessFile()));
  } else {
    RETURN_IF_ERROR(LoadFile());
  }
  return LoadTokens();
}

void Gate::Watch(std::function<void()> on_change, std::function<void()> on_token_expired) {
  if (options_.access_path.empty() && !options_.tls.enabled()) return;
  on_change_ = std::move(on_change);
  on_token_expired_ = std::move(on_token_expired);
  watcher_ = std::thread([this] { Look(); });
}

void Gate::Look() {
  std::string complaint;
  absl::Time looked = clock_.Now();
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      if (AwaitFor(mutex_, absl::Condition(&stopping_), kLookInterval)) return;
    }
    if (!options_.access_path.empty() && TakeUpFile(&complaint)) {
      spdlog::info("{} has changed and is in force", options_.access_path);
      on_change_();
    }
    const absl::Time now = clock_.Now();
    if (ACertificateExpired(now)) on_change_();
    if (ATokenExpired(looked, now)) on_token_expired_();
    looked = now;
  }
}

bool Gate::TakeUpFile(std::string* complaint) {
  std::string before;
  {
    absl::MutexLock lock(&mutex_);
    before = file_text_;
  }
  const absl::Status loaded = LoadFile();
  if (!loaded.ok()) {
    // A mistake is logged once, not every second.
    if (*complaint != loaded.message()) {
      spdlog::error("{}; what it said before stays in force", std::string(loaded.message()));
    }
    *complaint = std::string(loaded.message());
    return false;
  }
  complaint->clear();
  absl::MutexLock lock(&mutex_);
  return before != file_text_;
}

bool Gate::ATokenExpired(absl::Time after, absl::Time until) const {
  absl::MutexLock lock(&mutex_);
  return std::any_of(tokens_.begin(), tokens_.end(), [&](const auto& entry) {
    const absl::Time expires = ExpiryOf(entry.second);
    return after < expires && expires <= until;
  });
}

bool Gate::ACertificateExpired(absl::Time now) {
  absl::MutexLock lock(&mutex_);
  const auto valid = expiries_.upper_bound(now);
  const bool any = valid != expiries_.begin();
  expiries_.erase(expiries_.begin(), valid);
  return any;
}

absl::Status Gate::LoadFile() {
  ASSIGN_OR_RETURN(const std::string text, AccessFile::Read(options_.access_path));
  {
    absl::MutexLock lock(&mutex_);
    if (!file_text_.empty() && text == file_text_) return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(AccessFile file, AccessFile::Parse(text, options_.access_path));
  RETURN_IF_ERROR(CheckRoles(options_, file));
  absl::MutexLock lock(&mutex_);
  file_text_ = text;
  file_ = std::move(file);
  return absl::OkStatus();
}

absl::Status Gate::LoadTokens() {
  absl::MutexLock loading(&loading_);
  std::map<std::string, v1::Token> tokens;
  RETURN_IF_ERROR(store_.Read([&](store::ReadTransaction& t) -> absl::Status {
    ASSIGN_OR_RETURN(std::vector<store::StoredToken> stored, t.ListTokens());
    for (store::StoredToken& token : stored) tokens[token.sha256] = std::move(token.token);
    return absl::OkStatus();
  }));
  absl::MutexLock lock(&mutex_);
  tokens_ = std::move(tokens);
  return absl::OkStatus();
}

absl::StatusOr<Caller> Gate::CallerOfToken(const std::string& text) const {
  absl::MutexLock lock(&mutex_);
  const auto found = tokens_.find(TokenHash(text));
  if (found == tokens_.end()) {
    return absl::UnauthenticatedError("the token is none of this coordinator's, or was revoked");
  }
  const v1::Token& token = found->second;
  const absl::Time expires = ExpiryOf(token);
  if (clock_.Now() >= expires) {
    return absl::UnauthenticatedError(absl::StrCat(token.name(), " expired at ",
                                                   absl::FormatTime(expires, absl::UTCTimeZone()),
                                                   "; ask an admin for another"));
  }
  return Caller{.role = token.role(),
                .name = token.user(),
                .project = token.project(),
                .credential = absl::StrCat("token ", token.name().substr(sizeof("tokens/") - 1))};
}

CertificateNames Gate::NamesOfCaller(const InputMetadata& metadata,
                                     const grpc::AuthContext& context) const {
  // Hashes, so that the time that it takes tells nobody how much of a guess is right.
  const bool vouched = TokenHash(Header(metadata, kVoucherKey)) == TokenHash(voucher_);
  return vouched ? NamesOfDer(Header(metadata, kCertificateKey)) : NamesOf(context);
}

absl::StatusOr<Caller> Gate::Identify(const InputMetadata& metadata,
                                      const grpc::AuthContext& context) const {
  const CertificateNames names = NamesOfCaller(metadata, context);
  if (names.expires <= clock_.Now()) {
    return absl::UnauthenticatedError(
        absl::StrCat("the certificate of this connection expired at ",
                     absl::FormatTime(absl::RFC3339_sec, names.expires, absl::UTCTimeZone()),
                     ": connect again with one that is valid"));
  }
  // Without a file, or on a port in plain text (CheckRoles), whoever may connect may do everything.
  if (options_.access_path.empty() || !options_.tls.enabled()) return LocalCaller();
  switch (metadata.count("authorization")) {
    case 0:
      break;
    case 1: {
      // A token that is shown counts, also beside a certificate, and most of all when it is wrong.
      const std::string value = Header(metadata, "authorization");
      if (!absl::StartsWithIgnoreCase(value, kBearer)) {
        return absl::UnauthenticatedError("authorization: \"Bearer TOKEN\" is expected");
      }
      if (!names.empty()) {
        absl::MutexLock lock(&mutex_);
        RETURN_IF_ERROR(file_.CheckNotShutOut(names));
      }
      return CallerOfToken(value.substr(sizeof(kBearer) - 1));
    }
    default:
      return absl::UnauthenticatedError("authorization: given more than once");
  }
  if (names.empty()) return Caller{};
  absl::MutexLock lock(&mutex_);
  ASSIGN_OR_RETURN(Caller caller, file_.Find(names));
  caller.credential = absl::CHexEscape(absl::StrCat(
      "certificate ",
      names.common_name.empty() ? caller.certificate : absl::StrCat("CN=", names.common_name)));
  return caller;
}

grpc::Status Gate::Process(const InputMetadata& metadata, grpc::AuthContext* context,
                           OutputMetadata*, OutputMetadata*) {
  const std::string path = Header(metadata, ":path");
  const absl::StatusOr<Caller> caller = Identify(metadata, *context);
  // Whoever shows something wrong may still ask whether the coordinator is well.
  const absl::Status allowed = CheckBeforeHandler(path, caller.value_or(Caller{}));
  if (allowed.ok()) return grpc::Status::OK;
  const absl::Status refused = caller.ok() ? allowed : caller.status();
  const std::string agent = absl::StrCat("client ", Header(metadata, "user-agent"));
  NoteRefused(caller.value_or(Caller{}), absl::CHexEscape(agent).substr(0, kMaxAgentBytes), path,
              "", refused);
  return ToGrpc(refused);
}

absl::StatusOr<Caller> Gate::Admit(const grpc::CallbackServerContext& context,
                                   const std::string& service, const std::string& method,
                                   const std::string& resource) {
  const std::string path = absl::StrCat("/ringleader.v1.", service, "/", method);
  const absl::StatusOr<Caller> caller =
      Identify(context.client_metadata(), *context.auth_context());
  absl::Status refused = caller.status();
  if (caller.ok()) refused = CheckMethod(path, *caller);
  if (refused.ok()) {
    const absl::Time expires =
        NamesOfCaller(context.client_metadata(), *context.auth_context()).expires;
    if (expires == absl::InfiniteFuture()) return caller;
    absl::MutexLock lock(&mutex_);
    expiries_.insert(expires);
    return caller;
  }
  NoteRefused(caller.value_or(Caller{}), context.peer(), path, resource, refused);
  return refused;
}

void Gate::NoteRefused(const Caller& caller, const std::string& address,
                       const std::string& method_path, const std::string& resource,
                       const absl::Status& status) {
  v1::AuditRecord record = RecordOf(caller, address);
  record.set_method(ShortMethod(method_path));
  record.set_resource(RecordText(resource));
  audit_.Note(std::move(record), status);
}

}  // namespace ringleader::access
