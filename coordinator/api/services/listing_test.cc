#include "coordinator/api/services/listing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/api/services/requests.h"
#include "ringleader/v1/job_service.pb.h"

namespace ringleader::api {
namespace {

using store::JobTerm;
using ::testing::HasSubstr;

std::string Complaint(std::string_view filter) {
  return std::string(ParseJobFilter(filter).status().message());
}

TEST(FilterTest, ReadsTerms) {
  const auto terms = ParseJobFilter(
      R"(state=RUNNING AND labels.team != "deep \"sea" AND labels.urgent:* AND name=a-1)");
  ASSERT_TRUE(terms.ok()) << terms.status();
  ASSERT_EQ(terms->size(), 4u);
  EXPECT_EQ((*terms)[0].field, JobTerm::Field::kState);
  EXPECT_EQ((*terms)[0].value, "RUNNING");
  EXPECT_EQ((*terms)[1].label, "team");
  EXPECT_EQ((*terms)[1].op, JobTerm::Operator::kNotEquals);
  EXPECT_EQ((*terms)[1].value, "deep \"sea");
  EXPECT_EQ((*terms)[2].op, JobTerm::Operator::kHas);
  EXPECT_EQ((*terms)[3].field, JobTerm::Field::kName);
  EXPECT_TRUE(ParseJobFilter("")->empty());
  EXPECT_TRUE(ParseJobFilter("  ")->empty());
}

// Each term looks at every job, before anybody else gets a turn.
TEST(FilterTest, HasFewTerms) {
  std::string filter = "labels.a=b";
  for (int i = 1; i < 8; ++i) filter += " AND labels.a=b";
  EXPECT_TRUE(ParseJobFilter(filter).ok());
  EXPECT_THAT(Complaint(filter + " AND state=RUNNING"), HasSubstr("more than 8 terms"));
}

TEST(FilterTest, SaysWhereAndWhat) {
  EXPECT_THAT(Complaint("stat=RUNNING"),
              HasSubstr("at character 1: expected state, name, owner, project or labels.KEY"));
  EXPECT_THAT(Complaint("state=RUNING"), HasSubstr("at character 7: no such job state"));
  EXPECT_THAT(Complaint("state:RUNNING"), HasSubstr("at character 6: expected = or !="));
  EXPECT_THAT(Complaint("state=RUNNING name=x"), HasSubstr("at character 15: expected AND"));
  EXPECT_THAT(Complaint("name="), HasSubstr("expected a value"));
  EXPECT_THAT(Complaint("name=\"x"), HasSubstr("the quote is not closed"));
  EXPECT_THAT(Complaint("labels.a:b"), HasSubstr("expected *"));
  EXPECT_THAT(Complaint("state=RUNNING AND"), HasSubstr("expected state"));
  EXPECT_THAT(Complaint(std::string(5000, 'x')), HasSubstr("longer than"));
}

TEST(PageTokenTest, HoldsForTheSameArgumentsOnly) {
  const std::string token = MakePageToken("42", "ListJobs\nstate=RUNNING");
  EXPECT_EQ(*ParsePageToken(token, "ListJobs\nstate=RUNNING"), "42");
  EXPECT_EQ(*ParsePageToken("", "anything"), "");
  EXPECT_THAT(std::string(ParsePageToken(token, "ListJobs\n").status().message()),
              HasSubstr("filter differs"));
  for (const char* garbage : {"x", "%%%", "QUJD", "AAAAAAAAAAAAAAAAAAAAAAAAAAAA"}) {
    EXPECT_EQ(ParsePageToken(garbage, "").status().code(), absl::StatusCode::kInvalidArgument)
        << garbage;
  }
}

TEST(PageSizeTest, DefaultAndBounds) {
  EXPECT_EQ(*PageSize(0), kDefaultPageSize);
  EXPECT_EQ(*PageSize(7), 7);
  EXPECT_EQ(*PageSize(1 << 30), kMaxPageSize);
  EXPECT_FALSE(PageSize(-1).ok());
}

TEST(RequestKeyTest, SameArgumentsOfTheSameCallerSameFingerprint) {
  const Change change = {.caller = access::LocalCaller(), .record = {}, .method = "CreateJob"};
  v1::CreateJobRequest request;
  request.set_request_id("r1");
  for (const char* label : {"a", "b", "c", "d"})
    (*request.mutable_spec()->mutable_labels())[label] = "x";
  v1::CreateJobRequest again;
  again.set_request_id("r2");
  for (const char* label : {"d", "c", "b", "a"})
    (*again.mutable_spec()->mutable_labels())[label] = "x";
  EXPECT_EQ(KeyOf(change, request)->fingerprint, KeyOf(change, again)->fingerprint);
  again.mutable_spec()->set_name("other");
  EXPECT_NE(KeyOf(change, request)->fingerprint, KeyOf(change, again)->fingerprint);
  Change alice = change, bob = change;
  alice.caller = {.role = v1::USER, .name = "alice"};
  bob.caller = {.role = v1::USER, .name = "bob"};
  EXPECT_EQ(KeyOf(alice, request)->fingerprint, KeyOf(alice, request)->fingerprint);
  EXPECT_NE(KeyOf(alice, request)->fingerprint, KeyOf(bob, request)->fingerprint);
  EXPECT_NE(KeyOf(alice, request)->fingerprint, KeyOf(change, request)->fingerprint);
  for (const std::string& id :
       {std::string(129, 'x'), std::string("a b"), std::string("\n"), std::string("\xff")}) {
    request.set_request_id(id);
    EXPECT_FALSE(KeyOf(change, request).ok());
  }
}

}  // namespace
}  // namespace ringleader::api
