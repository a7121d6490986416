#include "worker/agent/trainers/path_checks.h"

#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/process/time_limit.h"
#include "jobspec/roots.h"

namespace ringleader::agent {
namespace {

// How long one look may take.
constexpr absl::Duration kPatience = absl::Seconds(3);
// Looks of one owner at a time. Many jobs that start at once are not to be refused for their
// number: that is for looks that hang.
constexpr int kAtOnce = kMaxLimitedCallsOfOne / 2;

}  // namespace

PathChecks::PathChecks(std::vector<std::string> roots, Post post)
    : roots_(std::move(roots)), returns_(std::make_shared<Returns>()) {
  absl::MutexLock lock(&returns_->mutex);
  returns_->post = std::move(post);
}

PathChecks::~PathChecks() {
  absl::MutexLock lock(&returns_->mutex);
  returns_->post = nullptr;
}

void PathChecks::Begin(const std::string& job, const v1::StartTrainers& start, Done done) {
  // Where nobody is known to own jobs, each stands for itself.
  const std::string owner = start.owner().empty() ? "jobs/" + job : start.owner();
  owners_[owner].waiting.push_back({.spec = start.spec(), .done = std::move(done)});
  BeginNext(owner);
}

void PathChecks::BeginNext(const std::string& owner) {
  Owner& looks = owners_[owner];
  while (looks.under_way < kAtOnce && !looks.waiting.empty()) {
    ++looks.under_way;
    Look next = std::move(looks.waiting.front());
    looks.waiting.pop_front();
    Run(owner, std::move(next));
  }
  if (looks.under_way == 0) owners_.erase(owner);
}

void PathChecks::Run(const std::string& owner, Look look) {
  const auto end = [this, returns = returns_, owner,
                    done = std::move(look.done)](const absl::Status& status) {
    absl::MutexLock lock(&returns->mutex);
    if (!returns->post) return;
    returns->post([this, owner, done, status] { OnEnd(owner, done, status); });
  };
  try {
    std::thread([owner, spec = std::move(look.spec), roots = roots_, end] {
      end(WithTimeLimit(owner, kPatience, "looking for the job's files", [spec, roots] {
        return jobspec::CheckPaths(spec, roots, jobspec::RootCheck::kFiles);
      }));
    }).detach();
  } catch (const std::system_error& error) {
    end(absl::ResourceExhaustedError(
        absl::StrCat("looking for the job's files: no thread for it: ", error.what())));
  }
}

void PathChecks::OnEnd(const std::string& owner, const Done& done, const absl::Status& status) {
  --owners_[owner].under_way;
  BeginNext(owner);
  done(status);
}

}  // namespace ringleader::agent
