// A store in a folder of its own, and what tests write and read there.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "base/testing/fake_clock.h"
#include "base/testing/temp_dir.h"
#include "coordinator/store/sqlite/sqlite_store.h"

namespace ringleader::store::testing {

class OpenedStoreTest : public ::testing::Test {
 protected:
  // `options` but for the path and the clock.
  explicit OpenedStoreTest(SqliteOptions options = {}) : options_(std::move(options)) {
    options_.path = dir_.File("coordinator.db");
    options_.clock = &clock_;
    Reopen();
  }

  void Reopen() {
    store_.reset();
    auto store = OpenSqliteStore(options_);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }
  void Write(absl::FunctionRef<absl::Status(WriteTransaction&)> body) {
    const absl::Status status = store_->Write(body);
    ASSERT_TRUE(status.ok()) << status;
  }
  // The code with which a write fails.
  absl::StatusCode Refusal(absl::FunctionRef<absl::Status(WriteTransaction&)> body) {
    return store_->Write(body).code();
  }
  // What `read` returns inside a read transaction.
  template <typename F>
  auto Read(const F& read) {
    decltype(read(std::declval<ReadTransaction&>())) result = absl::UnknownError("not read");
    EXPECT_TRUE(store_
                    ->Read([&](ReadTransaction& t) {
                      result = read(t);
                      return absl::OkStatus();
                    })
                    .ok());
    return result;
  }
  static v1::Job NewJob(const std::string& id, v1::Job::State state = v1::Job::PENDING) {
    v1::Job job;
    job.set_name("jobs/" + id);
    job.set_uid("uid-" + id);
    job.set_state(state);
    job.mutable_spec()->set_name(id);
    return job;
  }
  void Create(const std::string& id, v1::Job::State state = v1::Job::PENDING) {
    Write([&](WriteTransaction& t) {
      v1::Job job = NewJob(id, state);
      return t.CreateJob(&job);
    });
  }
  std::vector<std::string> List(const JobQuery& query) {
    std::vector<std::string> ids;
    const auto page = Read([&](ReadTransaction& t) { return t.ListJobs(query); });
    EXPECT_TRUE(page.ok()) << page.status();
    if (!page.ok()) return ids;
    for (const v1::Job& job : page->jobs) ids.push_back(job.spec().name());
    return ids;
  }

  TempDir dir_;
  FakeClock clock_;
  SqliteOptions options_;
  std::unique_ptr<Store> store_;
};

}  // namespace ringleader::store::testing
