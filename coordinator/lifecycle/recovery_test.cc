// Nothing is stuck: what a restart, a clock that was set, a node that refuses or one that fails
// leaves behind.
#include "coordinator/lifecycle/nodes/node_table.h"
#include "coordinator/lifecycle/testing/controller_test.h"

namespace ringleader::lifecycle {
namespace {

using ::testing::AllOf;
using testing::FakeSession;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class RecoveryTest : public testing::ControllerTest {
 protected:
  void Pass(absl::Duration time) {
    clock_.Advance(time);
    controller_->RunOnce();
  }
  // Another coordinator on the same store, whose clock was set meanwhile.
  void RestartWithClockSetBy(absl::Duration by) {
    controller_.reset();
    clock_.Advance(by);
    Restart();
  }
  static v1::AttemptEvent Failed(uint32_t rank, bool retryable = true) {
    v1::AttemptEvent event;
    event.mutable_trainer_exited()->set_rank(rank);
    event.mutable_trainer_exited()->set_outcome(v1::TrainerExited::FAILED);
    event.mutable_trainer_exited()->set_message("an uncorrectable error of its memory");
    event.mutable_trainer_exited()->set_retryable(retryable);
    return event;
  }
  void SayOf(const std::string& job, const v1::Command& start,
             const std::shared_ptr<FakeSession>& session, v1::AttemptEvent event) {
    v1::WorkerMessage message;
    message.set_sequence(++sequences_[session->incarnation()]);
    event.set_job(job);
    event.set_attempt(start.attempt());
    event.set_fencing_token(start.fencing_token());
    *message.mutable_event() = std::move(event);
    controller_->OnMessage(session, message);
    controller_->RunOnce();
  }
  void Answer(const std::shared_ptr<FakeSession>& session, const v1::Command& command,
              bool accepted, bool later = false) {
    v1::WorkerMessage message;
    message.set_sequence(++sequences_[session->incarnation()]);
    message.mutable_command_ack()->set_command_id(command.command_id());
    message.mutable_command_ack()->set_accepted(accepted);
    message.mutable_command_ack()->set_later(later);
    if (!accepted) message.mutable_command_ack()->set_message("1 of 2 trainers are taken");
    controller_->OnMessage(session, message);
    controller_->RunOnce();
  }
  // The job's start command, which is all that came.
  v1::Command StartOf(const std::shared_ptr<FakeSession>& session) {
    for (const v1::Command& command : session->Commands()) {
      if (command.has_start()) return command;
    }
    ADD_FAILURE() << "no start on " << session->node();
    return {};
  }
  absl::StatusOr<v1::Job> Resume(const std::string& name) {
    return Do([&] { return controller_->ResumeJob(name, "", {}); });
  }
  v1::Node Node(const std::string& id) {
    for (const v1::Node& node : controller_->ListNodes()) {
      if (node.name() == "nodes/" + id) return node;
    }
    return {};
  }
  // A job of one attempt on `session`'s node that fails there by its own fault.
  void FailAJob(const std::string& name, const std::shared_ptr<FakeSession>& session) {
    v1::JobSpec spec = Spec(name);
    spec.mutable_scheduling()->set_max_retries(0);
    ASSERT_TRUE(Do([&] { return controller_->CreateJob(spec, {}); }).ok());
    controller_->RunOnce();
    const v1::Command start = StartOf(session);
    Answer(session, start, true);
    SayOf(name, start, session, Failed(0));
    SayOf(name, start, session, Failed(1));
    EXPECT_EQ(Job(name).state(), v1::Job::FAILED);
    session->Commands();  // it was told to stop the other rank
  }

  std::map<std::string, uint64_t> sequences_;  // by incarnation
};

TEST_F(RecoveryTest, UnknownEndsWithTheHelloThatFollowsARestart) {
  auto session = RunJob();
  session->FallSilent();
  Pass(options_.lease * 2);
  ASSERT_EQ(Job().state(), v1::Job::UNKNOWN);
  Restart();
  controller_->RunOnce();
  EXPECT_EQ(Job().state(), v1::Job::UNKNOWN);
  Connect("a", "folder.1", {Running()});
  EXPECT_EQ(Job().state(), v1::Job::RUNNING);
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::RUNNING);
}

TEST_F(RecoveryTest, UnknownAtARestartIsGivenUpIfNobodySaysHello) {
  auto session = RunJob();
  session->FallSilent();
  Pass(options_.lease * 2);
  Restart();
  Pass(options_.adoption_timeout - absl::Seconds(1));
  EXPECT_EQ(Job().state(), v1::Job::UNKNOWN);
  Pass(absl::Seconds(1));
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::FENCED);
}

// Its trainers hold a lease of 90 s still, whatever this coordinator would have given them.
TEST_F(RecoveryTest, ACoordinatorWithShorterTimesKeepsToWhatTheOneBeforePromised) {
  auto session = RunJob();
  session->FallSilent();
  Pass(options_.lease * 2);
  options_.fence_after = absl::Seconds(20);
  options_.adoption_timeout = absl::Seconds(25);
  Restart();
  Pass(absl::Seconds(94));
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::UNKNOWN);
  Pass(absl::Seconds(1));
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::FENCED);
}

// It says hello, and the answer that would shorten its trainers' lease does not arrive any more.
TEST_F(RecoveryTest, AHelloDoesNotEndWhatTheCoordinatorBeforePromised) {
  RunJob();
  options_.fence_after = absl::Seconds(20);
  options_.adoption_timeout = absl::Seconds(25);
  Restart();
  Connect("a", "folder.1", {Running()})->FallSilent();
  Pass(absl::Seconds(94));
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::UNKNOWN);
  Pass(absl::Seconds(1));
  EXPECT_EQ(Job().attempts(0).state(), v1::Attempt::FENCED);
}

TEST_F(RecoveryTest, ARetryWaitsForItsBackOffWhicheverWayTheClockWasSet) {
  for (const absl::Duration set_by : {-absl::Hours(24 * 30), absl::Hours(24 * 30)}) {
    const std::string name = set_by < absl::ZeroDuration() ? "back" : "ahead";
    auto session = Connect(name, name + ".1");
    ASSERT_TRUE(Create(name).ok());
    controller_->RunOnce();
    const v1::Command start = StartOf(session);
    Answer(session, start, true);
    SayOf(name, start, session, Failed(0));
    SayOf(name, start, session, Failed(1));
    ASSERT_EQ(Job(name).state(), v1::Job::RETRYING);
    RestartWithClockSetBy(set_by);
    Pass(options_.retry_backoff);
    EXPECT_EQ(Job(name).state(), v1::Job::PENDING) << name;
    ASSERT_TRUE(Do([&] { return controller_->CancelJob(name, "", {}); }).ok());
  }
}

TEST_F(RecoveryTest, AStartTimesOutInItsTimeWhicheverWayTheClockWasSet) {
  for (const absl::Duration set_by : {-absl::Hours(24 * 30), absl::Hours(24 * 30)}) {
    const std::string name = set_by < absl::ZeroDuration() ? "back" : "ahead";
    auto session = Connect(name, name + ".1");
    ASSERT_TRUE(Create(name).ok());
    controller_->RunOnce();
    Answer(session, StartOf(session), true);
    RestartWithClockSetBy(set_by);
    v1::RunningAttempt running;
    running.set_job(name);
    running.set_attempt(1);
    running.set_fencing_token(Job(name).attempts(0).fencing_token());
    running.add_ranks(0);
    running.add_ranks(1);
    session = Connect(name, name + ".1", {running});
    Pass(options_.start_timeout - absl::Seconds(1));
    EXPECT_EQ(Job(name).state(), v1::Job::STARTING) << name;
    EXPECT_THAT(session->Commands(), IsEmpty());
    Pass(absl::Seconds(1));
    EXPECT_THAT(session->Commands(), SizeIs(1)) << name << ": told to stop";
    EXPECT_THAT(Job(name).state_reason(), HasSubstr("not ready 10m after it was placed"));
    ASSERT_TRUE(Do([&] { return controller_->CancelJob(name, "", {}); }).ok());
    controller_->OnClosed(session);
    controller_->RunOnce();
  }
}

TEST_F(RecoveryTest, ARefusalForNowCostsNoRetryAndTheJobGoesElsewhereForAWhile) {
  auto a = Connect("a", "a.1");
  ASSERT_TRUE(Create("j").ok());
  controller_->RunOnce();
  Answer(a, StartOf(a), false, /*later=*/true);
  EXPECT_EQ(Job().state(), v1::Job::RETRYING);
  EXPECT_EQ(Job().retries_used(), 0u);
  EXPECT_THAT(Job().state_reason(), AllOf(HasSubstr("1 of 2 trainers are taken"),
                                          HasSubstr("does not count as a retry")));
  Pass(options_.retry_backoff);
  EXPECT_THAT(a->Commands(), IsEmpty());
  EXPECT_THAT(Job().state_reason(), HasSubstr("avoids nodes that refused it: a"));
  // Others get its room meanwhile.
  ASSERT_TRUE(Create("other").ok());
  controller_->RunOnce();
  EXPECT_EQ(StartOf(a).job(), "other");
  auto b = Connect("b", "b.1");
  EXPECT_EQ(StartOf(b).job(), "j");
}

TEST_F(RecoveryTest, ANodeThatRefusedIsAskedAgainLaterAndLater) {
  auto a = Connect("a", "a.1");
  ASSERT_TRUE(Create("j").ok());
  controller_->RunOnce();
  for (const absl::Duration pause : {options_.refusal_pause, options_.refusal_pause * 2}) {
    Answer(a, StartOf(a), false, /*later=*/true);
    Pass(pause - absl::Seconds(1));
    EXPECT_THAT(a->Commands(), IsEmpty());
    Pass(absl::Seconds(1));
    Pass(absl::ZeroDuration());
  }
  Answer(a, StartOf(a), true);
  EXPECT_EQ(Job().retries_used(), 0u);
}

TEST_F(RecoveryTest, AfterAStepARefusalIsAFirstOneAgain) {
  auto a = Connect("a", "a.1");
  ASSERT_TRUE(Create("j").ok());
  controller_->RunOnce();
  Answer(a, StartOf(a), false, /*later=*/true);
  Pass(options_.refusal_pause);
  Pass(absl::ZeroDuration());
  const v1::Command start = StartOf(a);
  Answer(a, start, true);
  for (const v1::AttemptEvent& event :
       {Ready(0), Ready(1), Step(1, 0), Step(1, 1), Failed(0), Failed(1)}) {
    SayOf("j", start, a, event);
  }
  a->Commands();
  Pass(options_.retry_backoff);
  Answer(a, StartOf(a), false, /*later=*/true);
  Pass(options_.refusal_pause - absl::Seconds(1));
  EXPECT_THAT(a->Commands(), IsEmpty());
  Pass(absl::Seconds(1));
  Pass(absl::ZeroDuration());
  EXPECT_EQ(StartOf(a).attempt(), 4u);
}

TEST_F(RecoveryTest, ARefusalOfTheJobItselfCostsARetry) {
  auto a = Connect("a", "a.1");
  ASSERT_TRUE(Create("j").ok());
  controller_->RunOnce();
  Answer(a, StartOf(a), false);
  EXPECT_EQ(Job().retries_used(), 1u);
}

TEST_F(RecoveryTest, ANodeThatFailsOneJobAfterAnotherIsSetAsideAndSaysWhy) {
  auto a = Connect("a", "a.1");
  for (const char* name : {"j1", "j2"}) FailAJob(name, a);
  auto b = Connect("b", "b.1");
  EXPECT_EQ(Node("a").state(), v1::Node::READY);
  FailAJob("j3", a);  // a has it, for names that come first go first
  EXPECT_EQ(Node("a").state(), v1::Node::DRAINED);
  EXPECT_THAT(Node("a").state_reason(),
              AllOf(HasSubstr("set aside until"), HasSubstr("attempts of 3 jobs failed here"),
                    HasSubstr("an uncorrectable error"), HasSubstr("ringctl undrain a")));
  ASSERT_TRUE(Create("next").ok());
  controller_->RunOnce();
  EXPECT_THAT(a->Commands(), IsEmpty());
  EXPECT_EQ(StartOf(b).job(), "next");
  ASSERT_TRUE(Create("waits").ok());
  controller_->RunOnce();
  // An operator's verb takes the node back.
  ASSERT_TRUE(Do([&] { return controller_->UndrainNode("a", {}); }).ok());
  controller_->RunOnce();  // the plan, unless Do() has come to it
  EXPECT_EQ(Node("a").state(), v1::Node::READY);
  EXPECT_EQ(StartOf(a).job(), "waits");
}

TEST_F(RecoveryTest, ANodeThatWasSetAsideComesBackByItself) {
  auto a = Connect("a", "a.1");
  auto far = Connect("z", "z.1");
  for (const char* name : {"j1", "j2", "j3"}) FailAJob(name, a);
  ASSERT_EQ(Node("a").state(), v1::Node::DRAINED);
  ASSERT_TRUE(Do([&] { return controller_->DrainNode("z", {}); }).ok());
  ASSERT_TRUE(Create("waits").ok());
  Pass(options_.set_aside_for - absl::Seconds(1));
  EXPECT_EQ(Node("a").state(), v1::Node::DRAINED);
  EXPECT_THAT(a->Commands(), IsEmpty());
  Pass(absl::Seconds(1));
  EXPECT_EQ(StartOf(a).job(), "waits");
}

TEST_F(RecoveryTest, AStepOnANodeWipesOutWhatFailedThereBefore) {
  auto a = Connect("a", "a.1");
  auto far = Connect("z", "z.1");
  for (const char* name : {"j1", "j2"}) FailAJob(name, a);
  ASSERT_TRUE(Create("j").ok());
  controller_->RunOnce();
  const v1::Command start = StartOf(a);
  Answer(a, start, true);
  for (const v1::AttemptEvent& event :
       {Ready(0), Ready(1), Step(1, 0), Step(1, 1), Failed(0), Failed(1)}) {
    SayOf("j", start, a, event);
  }
  EXPECT_EQ(Job().state(), v1::Job::RETRYING);
  EXPECT_EQ(Node("a").state(), v1::Node::READY);
}

TEST_F(RecoveryTest, FailuresThatLieFarApartSetNoNodeAside) {
  auto a = Connect("a", "a.1");
  auto far = Connect("z", "z.1");
  for (const char* name : {"j1", "j2", "j3"}) {
    FailAJob(name, a);
    Pass(options_.set_aside_window / 2 + absl::Seconds(1));
  }
  EXPECT_EQ(Node("a").state(), v1::Node::READY);
}

TEST(FailureLogTest, CountsJobsThatFailedSinceATimeOrThen) {
  const absl::Time noon = absl::UnixEpoch() + absl::Hours(12);
  FailureLog log;
  log.Add("early", noon - absl::Nanoseconds(1));
  log.Add("then", noon);
  log.Add("late", noon + absl::Seconds(1));
  log.Add("late", noon + absl::Seconds(2));
  EXPECT_EQ(log.JobsSince(noon), 2u);
  EXPECT_FALSE(log.Forget("early")) << "it counts no more";
  EXPECT_TRUE(log.Forget("then"));
  EXPECT_FALSE(log.Forget("then"));
  EXPECT_EQ(log.JobsSince(noon), 1u);
  log.Clear();
  EXPECT_EQ(log.JobsSince(absl::InfinitePast()), 0u);
}

TEST_F(RecoveryTest, JobsThatFailEverywhereSetNoNodeAside) {
  auto a = Connect("a", "a.1");
  auto far = Connect("z", "z.1");  // or a would be the last that takes trainers
  for (const std::string name : {"j1", "j2", "j3"}) {
    ASSERT_TRUE(Create(name).ok());
    controller_->RunOnce();
    const v1::Command start = StartOf(a);
    Answer(a, start, true);
    for (const uint32_t rank : {0u, 1u}) SayOf(name, start, a, Failed(rank));
    // Its second try goes to another node.
    auto other = Connect(name, name + ".1");
    ASSERT_TRUE(Do([&] { return controller_->DrainNode("a", {}); }).ok());
    Pass(options_.retry_backoff);
    const v1::Command again = StartOf(other);
    Answer(other, again, true);
    for (const uint32_t rank : {0u, 1u}) SayOf(name, again, other, Failed(rank));
    ASSERT_TRUE(Do([&] { return controller_->DrainNode(name, {}); }).ok());
    ASSERT_TRUE(Do([&] { return controller_->UndrainNode("a", {}); }).ok());
    a->Commands();
  }
  EXPECT_EQ(Node("a").state(), v1::Node::READY);
  EXPECT_EQ(Node("a").state_reason(), "");
}

// Not the one where they fail for the second time either.
TEST_F(RecoveryTest, JobsThatFailOnTwoNodesSetNeitherAside) {
  auto a = Connect("a", "a.1"), b = Connect("b", "b.1");
  auto far = Connect("z", "z.1");
  for (const std::string name : {"j1", "j2", "j3"}) {
    ASSERT_TRUE(Create(name).ok());
    controller_->RunOnce();
    for (const auto& session : {a, b}) {
      const v1::Command start = StartOf(session);
      Answer(session, start, true);
      for (const uint32_t rank : {0u, 1u}) SayOf(name, start, session, Failed(rank));
      session->Commands();
      ASSERT_TRUE(Do([&] { return controller_->DrainNode("a", {}); }).ok());
      Pass(options_.retry_backoff);
    }
    ASSERT_TRUE(Do([&] { return controller_->UndrainNode("a", {}); }).ok());
  }
  for (const char* node : {"a", "b"}) {
    EXPECT_EQ(Node(node).state(), v1::Node::READY);
    EXPECT_EQ(Node(node).state_reason(), "");
  }
}

TEST_F(RecoveryTest, TheLastNodeThatTakesTrainersIsNotSetAside) {
  auto a = Connect("a", "a.1");
  for (const char* name : {"j1", "j2", "j3", "j4"}) FailAJob(name, a);
  EXPECT_EQ(Node("a").state(), v1::Node::READY);
  Connect("z", "z.1");  // which takes none either
  ASSERT_TRUE(Do([&] { return controller_->DrainNode("z", {}); }).ok());
  for (const char* name : {"j5", "j6", "j7"}) FailAJob(name, a);
  EXPECT_EQ(Node("a").state(), v1::Node::READY);
}

TEST_F(RecoveryTest, ASecondJobInOneCheckpointFolderIsRefusedBeforeItQueues) {
  ASSERT_TRUE(CreateIn("first", "/checkpoints/run").ok());
  for (const char* spelling : {"/checkpoints/run", "/checkpoints/run/", "/checkpoints//x/../run"}) {
    const absl::Status refused = CreateIn("second", spelling).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << spelling;
    EXPECT_THAT(std::string(refused.message()),
                AllOf(HasSubstr("checkpoint.directory: /checkpoints/run is that of jobs/first"),
                      HasSubstr("choose another folder")));
  }
  v1::JobSpec spec = Spec("second");
  spec.mutable_checkpoint()->set_directory("/checkpoints/run");
  EXPECT_EQ(PreviewOf(spec).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(CreateIn("first", "/checkpoints/run").status().code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(CreateIn("third", "/checkpoints/run2").ok());
  // A job's export replaces what is called `model` in its folder, and old checkpoints go.
  EXPECT_THAT(std::string(CreateIn("second", "/checkpoints/run/model/").status().message()),
              HasSubstr("/checkpoints/run/model lies in that of jobs/first"));
  ASSERT_TRUE(CreateIn("inner", "/inner/step-runs/a").ok());
  EXPECT_THAT(std::string(CreateIn("second", "/inner").status().message()),
              HasSubstr("/inner holds that of jobs/inner"));
  // Else one job in a folder that many work below would be in everybody's way.
  ASSERT_TRUE(CreateIn("above", "/checkpoints").ok());
  ASSERT_TRUE(CreateIn("root", "/").ok());
  EXPECT_TRUE(CreateIn("below", "/checkpoints/run/below").ok());
  EXPECT_FALSE(CreateIn("second", "/model/x").ok()) << "which jobs/root writes into";
  Restart();
  EXPECT_FALSE(CreateIn("second", "/checkpoints/run").ok());
  ASSERT_TRUE(Do([&] { return controller_->CancelJob("first", "", {}); }).ok());
  EXPECT_TRUE(CreateIn("second", "/checkpoints/run").ok());
}

TEST_F(RecoveryTest, AFailedJobIsResumedFromItsCheckpoint) {
  auto a = Connect("a", "a.1");
  ASSERT_TRUE(CreateIn("j", "/checkpoints/run").ok());
  controller_->RunOnce();
  const v1::Command start = StartOf(a);
  Answer(a, start, true);
  for (const uint32_t rank : {0u, 1u}) SayOf("j", start, a, Ready(rank));
  v1::AttemptEvent checkpoint;
  checkpoint.mutable_checkpoint()->set_step(4);
  SayOf("j", start, a, checkpoint);
  SayOf("j", start, a, Failed(0, /*retryable=*/false));
  SayOf("j", start, a, Failed(1));
  ASSERT_EQ(Job().state(), v1::Job::FAILED);
  a->Commands();

  const absl::StatusOr<v1::Job> resumed = Resume("j");
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_FALSE(resumed->has_end_time());
  EXPECT_EQ(resumed->retries_used(), 0u);
  controller_->RunOnce();
  const v1::Command again = StartOf(a);
  EXPECT_EQ(again.attempt(), 2u);
  EXPECT_EQ(again.start().checkpoint_step(), 4u);
  EXPECT_EQ(again.start().job_uid(), Job().uid());
  EXPECT_GT(again.fencing_token(), start.fencing_token());
  EXPECT_EQ(Job().state(), v1::Job::STARTING);
}

TEST_F(RecoveryTest, AFailedJobWhoseFolderAnotherHasByNowStaysFailed) {
  auto a = Connect("a", "a.1");
  ASSERT_TRUE(CreateIn("j", "/checkpoints/run").ok());
  controller_->RunOnce();
  const v1::Command start = StartOf(a);
  Answer(a, start, true);
  for (const uint32_t rank : {0u, 1u}) SayOf("j", start, a, Failed(rank, /*retryable=*/false));
  ASSERT_EQ(Job().state(), v1::Job::FAILED);
  ASSERT_TRUE(CreateIn("k", "/checkpoints/run").ok());
  EXPECT_THAT(std::string(Resume("j").status().message()), HasSubstr("is that of jobs/k"));
  EXPECT_EQ(Job().state(), v1::Job::FAILED);
}

// Both are attempt 1 of a job of this name on this node; only the token differs.
TEST_F(RecoveryTest, LateReportsOfADeletedJobDoNotLandInTheNextOneOfItsName) {
  auto a = RunJob();
  a->FallSilent();
  ASSERT_TRUE(Do([&] { return controller_->CancelJob("j", "", {}); }).ok());
  Pass(options_.adoption_timeout);
  ASSERT_EQ(Job().state(), v1::Job::CANCELLED);
  const uint64_t old_token = token_;
  const std::string old_uid = Job().uid();
  ASSERT_TRUE(Do([&]() -> absl::StatusOr<bool> {
                const absl::Status deleted = controller_->DeleteJob("j", "", {});
                if (!deleted.ok()) return deleted;
                return true;
              }).ok());
  ASSERT_TRUE(Create("j").ok());
  EXPECT_NE(Job().uid(), old_uid);
  // Its trainers run still, or so it says: they take the place of the new job's.
  auto again = Connect("a", "folder.1", {Running()});
  EXPECT_EQ(Job().state(), v1::Job::PENDING);
  auto b = Connect("b", "b.1");
  ASSERT_EQ(StartOf(b).fencing_token(), Job().attempts(0).fencing_token());
  uint64_t sequence = again->acknowledged();
  for (v1::AttemptEvent event : {Ready(0), Step(1, 0), Step(1, 1), Log("of the old one")}) {
    Say(again, ++sequence, event);  // under the old token
  }
  v1::AttemptEvent checkpoint;
  checkpoint.mutable_checkpoint()->set_step(7);
  Say(again, ++sequence, checkpoint);
  Say(again, ++sequence, Failed(0));
  EXPECT_EQ(Job().state(), v1::Job::STARTING);
  EXPECT_EQ(Job().progress().checkpoint_step(), 0u);
  EXPECT_EQ(Job().attempts(0).ranks(0).state(), v1::RankStatus::STARTING);
  EXPECT_THAT(Steps(), IsEmpty());
  EXPECT_THAT(LogTexts(), IsEmpty());
  EXPECT_EQ(token_, old_token);
}

}  // namespace
}  // namespace ringleader::lifecycle
