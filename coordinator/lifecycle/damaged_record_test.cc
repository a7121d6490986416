// One record that changed on the disk is its job's affair: whatever else is to be written in the
// same batch is written, and no worker has to send anything again.
#include <string>
#include <vector>

#include "coordinator/lifecycle/testing/controller_test.h"
#include "coordinator/store/testing/damage.h"
#include "coordinator/store/testing/forwarding_store.h"

namespace ringleader::lifecycle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class DamagedRecordTest : public testing::ControllerTest {
 protected:
  DamagedRecordTest() {
    options_.retry_backoff = absl::ZeroDuration();
    Restart();
  }

  void Damage(const std::string& table) { store::testing::DamageRecord(dir_.File("db"), table); }
  static v1::AttemptEvent Checkpoint(uint64_t step) {
    v1::AttemptEvent event;
    event.mutable_checkpoint()->set_step(step);
    event.mutable_checkpoint()->set_path("step");
    return event;
  }
  absl::Status ListCheckpoints(std::vector<uint64_t>* steps) {
    return sqlite_->Read([&](store::ReadTransaction& transaction) {
      const auto found = transaction.ListCheckpoints("j");
      if (!found.ok()) return found.status();
      for (const v1::CheckpointNotice& notice : *found) steps->push_back(notice.step());
      return absl::OkStatus();
    });
  }
};

TEST_F(DamagedRecordTest, OfACheckpointEndsNobodysBatch) {
  auto session = Connect("a", "folder.1");
  v1::JobSpec spec = Spec("j");
  spec.mutable_checkpoint()->set_keep_last(2);
  ASSERT_TRUE(Do([&] { return controller_->CreateJob(spec, {}); }).ok());
  const std::vector<v1::Command> commands = session->Commands();
  ASSERT_THAT(commands, SizeIs(1));
  token_ = commands[0].fencing_token();
  Acknowledge(session, 1, commands[0].command_id());
  Say(session, 2, Checkpoint(1));
  Damage("checkpoints");
  Say(session, 3, Checkpoint(2));
  std::vector<uint64_t> steps;
  EXPECT_EQ(ListCheckpoints(&steps).code(), absl::StatusCode::kDataLoss);
  Say(session, 4, Checkpoint(3));
  EXPECT_FALSE(session->closed().has_value());
  EXPECT_EQ(session->acknowledged(), 4u);
  EXPECT_EQ(ListCheckpoints(&steps), absl::OkStatus());
  EXPECT_THAT(steps, ElementsAre(2, 3));
}

// The job cannot go on from its checkpoint as it was; it says so, and others start.
TEST_F(DamagedRecordTest, OfAPlanFailsItsJobByName) {
  auto session = RunJob();
  Say(session, 4, Checkpoint(1));
  ASSERT_EQ(Job().progress().checkpoint_step(), 1u);
  Damage("plans");
  for (const uint32_t rank : {0u, 1u}) {
    v1::AttemptEvent exited;
    exited.mutable_trainer_exited()->set_rank(rank);
    exited.mutable_trainer_exited()->set_outcome(v1::TrainerExited::FAILED);
    exited.mutable_trainer_exited()->set_retryable(true);
    exited.mutable_trainer_exited()->set_message("it died");
    Say(session, 5 + rank, exited);
  }
  ASSERT_TRUE(Create("k").ok());
  clock_.Advance(absl::Minutes(1));
  for (int i = 0; i < 4; ++i) controller_->RunOnce();
  EXPECT_EQ(Job().state(), v1::Job::FAILED);
  EXPECT_THAT(Job().state_reason(), HasSubstr("the record of the plan of jobs/j is damaged"));
  EXPECT_EQ(Job("k").state(), v1::Job::STARTING);
  EXPECT_FALSE(session->closed().has_value());
}

// Trainers need no coordinator that knows what their steps cost: one that starts anew learns it.
TEST_F(DamagedRecordTest, OfAPlanOrAStepKeepsNoCoordinatorFromTakingUpTheJob) {
  auto session = RunJob();
  Say(session, 4, Step(1, 0));
  Say(session, 5, Step(1, 1));
  Damage("steps");
  Restart();
  EXPECT_TRUE(plans_.restored.has_value());
  EXPECT_THAT(plans_.relearned, IsEmpty());
  plans_.restored.reset();
  Damage("plans");
  Restart();
  EXPECT_FALSE(plans_.restored.has_value());
  session = Connect("a", "folder.1", {Running()});
  Say(session, 6, Step(2, 0));
  Say(session, 7, Step(2, 1));
  EXPECT_EQ(session->acknowledged(), 7u);
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  EXPECT_EQ(Job().progress().step(), 2u);
}

TEST_F(DamagedRecordTest, OfAReplyEndsOnlyTheRequestThatComesAgain) {
  auto session = RunJob();
  ASSERT_TRUE(Create("k", "request").ok());
  Damage("replies");
  const absl::Status refused = Create("k", "request").status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("request_id \"request\" is damaged"));
  EXPECT_FALSE(session->closed().has_value());
}

// Where it is not a record, but the file, no later try would succeed: the process ends.
TEST_F(DamagedRecordTest, OfWhatIsToBeWrittenIsToldOnce) {
  class DamagedStore : public store::testing::ForwardingStore {
   public:
    using ForwardingStore::ForwardingStore;
    absl::Status Write(absl::FunctionRef<absl::Status(store::WriteTransaction&)>,
                       store::Need) override {
      return absl::DataLossError("database db: it is damaged");
    }
  };
  DamagedStore damaged(sqlite_.get());
  std::vector<absl::Status> told;
  controller_ = *JobController::Create(options_, &store_, &plans_, &clock_, nullptr,
                                       [&](const absl::Status& damage) { told.push_back(damage); });
  ASSERT_TRUE(Create("j").ok());
  EXPECT_THAT(told, IsEmpty());
  store_.MoveTo(&damaged);
  for (int i = 0; i < 2; ++i) EXPECT_FALSE(Create("k").ok());
  EXPECT_THAT(told, ElementsAre(absl::DataLossError("database db: it is damaged")));
  controller_.reset();
}

}  // namespace
}  // namespace ringleader::lifecycle
