// What the planner is asked of a job that is not submitted, and what its caller hears.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/testing/equals_text.h"
#include "coordinator/lifecycle/testing/controller_test.h"

namespace ringleader::lifecycle {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

class PreviewTest : public testing::ControllerTest {
 protected:
  // What the planner is asked for, which answers with `made`; what the caller hears is *preview.
  PlanRequest Preview(const v1::JobSpec& spec, absl::StatusOr<MadePlan> made,
                      absl::StatusOr<JobController::Preview>* preview) {
    plans_.held = true;
    const int asked = plans_.asked;
    controller_->PreviewJob(spec, {}, "alice", [&](auto got) { *preview = std::move(got); });
    EXPECT_EQ(plans_.asked, asked + 1);
    if (plans_.waiting.empty()) return {};
    PlanRequest request = plans_.waiting.back().request;
    plans_.waiting.back().done(std::move(made));
    plans_.waiting.pop_back();
    plans_.held = false;
    return request;
  }
  // The same of a plan that can be made.
  PlanRequest Previewed(const v1::JobSpec& spec, std::string* pending_reason) {
    absl::StatusOr<JobController::Preview> preview;
    PlanRequest request = Preview(spec, testing::FixedPlan::Made(), &preview);
    EXPECT_TRUE(preview.ok()) << preview.status();
    if (preview.ok()) *pending_reason = preview->pending_reason;
    return request;
  }
};

TEST_F(PreviewTest, APreviewIsOfWhatIsFreeNow) {
  std::string pending_reason;
  PlanRequest request = Previewed(Spec("k"), &pending_reason);
  ASSERT_THAT(request.placements, SizeIs(1));
  EXPECT_THAT(request.placements[0], EqualsText("node: 'nodes/any' trainers: 2"));
  ASSERT_THAT(request.nodes, SizeIs(1));
  EXPECT_THAT(request.nodes[0], EqualsText(""));
  EXPECT_EQ(request.owner, "alice");
  EXPECT_TRUE(request.is_preview);
  EXPECT_NE(pending_reason, "");

  Connect("a", "folder.1");
  request = Previewed(Spec("k"), &pending_reason);
  ASSERT_THAT(request.placements, SizeIs(1));
  EXPECT_THAT(request.placements[0], EqualsText("node: 'nodes/a' trainers: 2"));
  EXPECT_THAT(request.nodes[0], EqualsText("trainers: 2"));
  EXPECT_EQ(pending_reason, "");

  // The plan of a job for the same slots is being made.
  plans_.held = true;
  ASSERT_TRUE(Create("j").ok());
  ASSERT_THAT(plans_.waiting, SizeIs(1));
  request = Previewed(Spec("k"), &pending_reason);
  EXPECT_EQ(request.placements.at(0).node(), "nodes/any");
  EXPECT_THAT(pending_reason, HasSubstr("0 free on"));
}

TEST_F(PreviewTest, APreviewComesAfterAllThatWaits) {
  Connect("a", "folder.1");
  plans_.held = true;
  ASSERT_TRUE(Do([&] { return controller_->CreateJob(Spec("runs", 1), {}); }).ok());
  std::string pending_reason;
  EXPECT_EQ(Previewed(Spec("k", 1), &pending_reason).placements.at(0).node(), "nodes/a");
  ASSERT_TRUE(Create("waits").ok());
  EXPECT_EQ(Previewed(Spec("k", 1), &pending_reason).placements.at(0).node(), "nodes/any");
  EXPECT_THAT(pending_reason, HasSubstr("held for jobs/waits, which is ahead in the queue"));
}

TEST_F(PreviewTest, WhyThereIsNoPlanIsSaid) {
  Connect("a", "folder.1");
  absl::StatusOr<JobController::Preview> preview;
  Preview(Spec("k"), absl::InvalidArgumentError("attention.window: too large"), &preview);
  EXPECT_EQ(preview.status(), absl::InvalidArgumentError("attention.window: too large"));
  Preview(Spec("k"), testing::FixedPlan::Made(), &preview);
  ASSERT_TRUE(preview.ok()) << preview.status();
  EXPECT_EQ(preview->plan.version(), 1u);
}

}  // namespace
}  // namespace ringleader::lifecycle
