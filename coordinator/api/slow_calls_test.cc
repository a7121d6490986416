// Calls that may take seconds: what one client asks for keeps no other waiting.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "coordinator/api/testing/access_fixture.h"

namespace ringleader::api::testing {
namespace {

class SlowCallsTest : public AccessTest {
 protected:
  struct Validation {
    explicit Validation(Client client) : by(std::move(client)) {}
    Client by;
    std::unique_ptr<grpc::ClientContext> context = Client::Context();
    v1::ValidateJobRequest request;
    v1::ValidateJobResponse response;
    grpc::Status status;
    absl::Notification done;
  };
  std::unique_ptr<Validation> Validate(const std::string& as) {
    auto call = std::make_unique<Validation>(As(as));
    *call->request.mutable_spec() = Spec("previewed");
    call->by.jobs->async()->ValidateJob(call->context.get(), &call->request, &call->response,
                                        [call = call.get()](const grpc::Status& status) {
                                          call->status = status;
                                          call->done.Notify();
                                        });
    return call;
  }
  // Waits until the planner, which answers nobody, was asked so often.
  void AwaitAsked(int plans) {
    const absl::Time give_up = absl::Now() + absl::Seconds(60);
    while (plans_.asked < plans && absl::Now() < give_up) absl::SleepFor(absl::Milliseconds(1));
    ASSERT_GE(plans_.asked, plans);
  }
  void AnswerAll() {
    for (auto& waiting : plans_.waiting) waiting.done(lifecycle::testing::FixedPlan::Made());
    plans_.waiting.clear();
  }
};

TEST_F(SlowCallsTest, PreviewsThatTakeLongKeepNobodyWaiting) {
  plans_.held = true;
  std::vector<std::unique_ptr<Validation>> calls(5);
  for (auto& call : calls) call = Validate("alice");
  AwaitAsked(4);
  // Of whoever previews, too: all users are one where there are no roles.
  for (const char* name : {"bob", "alice"}) {
    Client client = As(name);
    EXPECT_TRUE(client.List("labels.team=ocean").ok());
    const grpc::Status created = client.Create(absl::StrCat("of-", name));
    EXPECT_TRUE(created.ok()) << created.error_message();
  }
  EXPECT_TRUE(std::ranges::none_of(calls, [](auto& call) { return call->done.HasBeenNotified(); }));
  AwaitAsked(5);
  AnswerAll();
  for (const auto& call : calls) {
    call->done.WaitForNotification();
    EXPECT_TRUE(call->status.ok()) << call->status.error_message();
    EXPECT_EQ(call->response.plan().version(), 1);
    EXPECT_EQ(call->response.spec().name(), "previewed");
    EXPECT_NE(call->response.pending_reason(), "");
  }
}

TEST_F(SlowCallsTest, APreviewWaitsForSoLongAndNoLonger) {
  server_.reset();
  auto server = Start({.listen = kListen,
                       .tls = Certificates().Options("server"),
                       .access_path = dir_.File("access.yaml"),
                       .check_files = false,
                       .preview_patience = absl::Milliseconds(10)});
  ASSERT_TRUE(server.ok()) << server.status();
  server_ = *std::move(server);
  plans_.held = true;
  const auto call = Validate("alice");
  call->done.WaitForNotification();
  EXPECT_EQ(call->status.error_code(), StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(call->status.error_message(), "the plan takes too long; try again in a moment");
  AwaitAsked(1);
  AnswerAll();  // whom nobody hears
  EXPECT_TRUE(As("bob").Create("x").ok());
}

}  // namespace
}  // namespace ringleader::api::testing
