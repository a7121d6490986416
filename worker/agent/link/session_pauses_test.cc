#include "worker/agent/link/session_pauses.h"

#include <gmock/gmock.h>

#include <vector>

namespace ringleader::agent {
namespace {

using ::testing::ElementsAre;

constexpr absl::Duration kSecond = absl::Seconds(1);

class SessionPausesTest : public ::testing::Test {
 protected:
  std::vector<absl::Duration> Pauses(int count, const absl::Status& session, bool lease_runs) {
    std::vector<absl::Duration> pauses;
    for (int i = 0; i < count; ++i) pauses.push_back(pauses_.After(session, lease_runs));
    return pauses;
  }

  SessionPauses pauses_;
};

TEST_F(SessionPausesTest, AWorkerThatIsRefusedAsksLessAndLessOften) {
  for (const absl::Status& refusal :
       {absl::PermissionDeniedError("no role"), absl::UnauthenticatedError("expired")}) {
    EXPECT_EQ(pauses_.After(absl::OkStatus(), true), kFirstPause);
    EXPECT_THAT(Pauses(7, refusal, false),
                ElementsAre(2 * kSecond, 4 * kSecond, 8 * kSecond, 16 * kSecond, 32 * kSecond,
                            60 * kSecond, 60 * kSecond));
  }
  EXPECT_EQ(Pauses(1'000'000, absl::PermissionDeniedError("no role"), false).back(), 60 * kSecond);
}

// Once it is let in again, or something else is wrong, as while its coordinator is started anew.
TEST_F(SessionPausesTest, RefusalsCountInARow) {
  const absl::Status refusal = absl::PermissionDeniedError("no role");
  for (const absl::Status& other : {absl::OkStatus(), absl::UnavailableError("starting")}) {
    EXPECT_THAT(Pauses(3, refusal, false), ElementsAre(2 * kSecond, 4 * kSecond, 8 * kSecond));
    EXPECT_LE(pauses_.After(other, false), kLongestPause);
  }
}

// Its trainers are lost with the lease.
TEST_F(SessionPausesTest, AWorkerWithALeaseTriesOften) {
  EXPECT_EQ(pauses_.After(absl::OkStatus(), true), kFirstPause);
  EXPECT_THAT(Pauses(6, absl::PermissionDeniedError("no role"), true),
              ElementsAre(0.2 * kSecond, 0.4 * kSecond, 0.8 * kSecond, 1.6 * kSecond, 2 * kSecond,
                          2 * kSecond));
}

TEST_F(SessionPausesTest, OtherFailuresNeverWaitLong) {
  for (const absl::Status& failure :
       {absl::UnavailableError("away"), absl::AlreadyExistsError("another is there"),
        absl::FailedPreconditionError("another version")}) {
    EXPECT_EQ(pauses_.After(absl::OkStatus(), false), kFirstPause);
    EXPECT_THAT(Pauses(6, failure, false), ElementsAre(0.2 * kSecond, 0.4 * kSecond, 0.8 * kSecond,
                                                       1.6 * kSecond, 2 * kSecond, 2 * kSecond));
  }
}

}  // namespace
}  // namespace ringleader::agent
