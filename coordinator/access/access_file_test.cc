// What an access file says of certificates, and what it is refused for.
#include "coordinator/access/access_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/testing/temp_dir.h"

namespace ringleader::access {
namespace {

using ::testing::HasSubstr;

AccessFile Parsed(const std::string& text) {
  const auto file = AccessFile::Parse(text, "access.yaml");
  EXPECT_TRUE(file.ok()) << file.status();
  return file.value_or(AccessFile());
}

std::string Complaint(const std::string& text) {
  return std::string(AccessFile::Parse(text, "access.yaml").status().message());
}

std::string Refused(const AccessFile& file, const CertificateNames& names) {
  const auto caller = file.Find(names);
  EXPECT_EQ(caller.status().code(), absl::StatusCode::kUnauthenticated);
  return std::string(caller.status().message());
}

constexpr char kFile[] = R"(
certificates:
  - {email: mallory@example.org, role: none}
  - {common_name: gpu-01.example.org, role: node, name: gpu-01}
  - {email: alice@example.org, role: user, name: alice, project: ocean}
  - {dns: board.example.org, role: viewer, name: board}
  - {uri: "spiffe://example.org/root", role: admin, name: root}
)";

TEST(AccessFileTest, EntriesMatchByTheKindOfTheirName) {
  const AccessFile file = Parsed(kFile);
  const auto alice = file.Find({.emails = {"alice@example.org"}});
  ASSERT_TRUE(alice.ok()) << alice.status();
  EXPECT_EQ(alice->role, v1::USER);
  EXPECT_EQ(alice->name, "alice");
  EXPECT_EQ(alice->project, "ocean");
  EXPECT_EQ(file.Find({.common_name = "gpu-01.example.org"})->role, v1::NODE);
  EXPECT_EQ(file.Find({.dns = {"x", "board.example.org"}})->role, v1::VIEWER);
  EXPECT_EQ(file.Find({.uris = {"spiffe://example.org/root"}})->role, v1::ADMIN);
  // The same text as a name of another kind is somebody else's.
  EXPECT_THAT(Refused(file, {.dns = {"gpu-01.example.org"}}), HasSubstr("has no entry for it"));
  EXPECT_THAT(Refused(file, {.common_name = "alice@example.org"}), HasSubstr("has no entry"));
  EXPECT_THAT(Refused(file, {}), HasSubstr("has no role"));
}

TEST(AccessFileTest, TheFirstEntryDecidesAndShutsOut) {
  EXPECT_THAT(Refused(Parsed(kFile), {.emails = {"alice@example.org", "mallory@example.org"}}),
              HasSubstr("shut out"));
  // Neither has case.
  EXPECT_THAT(Refused(Parsed(kFile), {.emails = {"Mallory@Example.ORG"}}), HasSubstr("shut out"));
  EXPECT_TRUE(Parsed("certificates: [{dns: Board.Example.org, role: viewer, name: board}]")
                  .Find({.dns = {"bOARD.example.org"}})
                  .ok());
  const AccessFile trusting = Parsed(std::string(kFile) + "roles_in_certificates: true\n");
  EXPECT_THAT(Refused(trusting,
                      {.uris = {"ringleader://admin/mallory"}, .emails = {"mallory@example.org"}}),
              HasSubstr("shut out"));
}

TEST(AccessFileTest, OfACertificateWithSeveralNamesTheFilesOrderDecides) {
  const CertificateNames several = {.uris = {"ringleader://admin/mallory"},
                                    .dns = {"board.example.org"},
                                    .emails = {"x@example.org", "alice@example.org"},
                                    .common_name = "alice"};
  const auto caller = Parsed(std::string(kFile) + "roles_in_certificates: true\n").Find(several);
  ASSERT_TRUE(caller.ok()) << caller.status();
  EXPECT_EQ(caller->name, "alice");
  EXPECT_EQ(caller->certificate, "email alice@example.org");
  EXPECT_EQ(Parsed("roles_in_certificates: true")
                .Find({.uris = {"https://x", "ringleader://node/gpu-01"}})
                ->certificate,
            "uri ringleader://node/gpu-01");
}

TEST(AccessFileTest, UrisSpeakForThemselvesOnlyWhereTheFileSaysSo) {
  const CertificateNames node = {.uris = {"https://x", "ringleader://node/gpu-01"}};
  EXPECT_THAT(Refused(Parsed("certificates: []"), node), HasSubstr("no entry"));
  const AccessFile file = Parsed("roles_in_certificates: true");
  EXPECT_EQ(file.Find(node)->role, v1::NODE);
  EXPECT_EQ(file.Find(node)->name, "gpu-01");
  const auto user = file.Find({.uris = {"ringleader://user/ocean/alice"}});
  EXPECT_EQ(user->name, "alice");
  EXPECT_EQ(user->project, "ocean");
  EXPECT_EQ(user->role, v1::USER);
  for (const char* uri :
       {"ringleader://", "ringleader://root/a", "ringleader://node", "ringleader:///a",
        "ringleader://node/", "ringleader://node/a/b/c", "ringleader://node/a%2fb",
        "ringleader://user//alice/", "ringleader://user/a b/c", "ringleader://node/\n",
        "ringleader://node/a@b"}) {
    EXPECT_FALSE(file.Find({.uris = {uri}}).ok()) << uri;
  }
  EXPECT_THAT(Refused(file, {.uris = {"ringleader://node/a", "ringleader://node/b"}}),
              HasSubstr("give it one"));
  // What a name holds reaches no log as it is.
  EXPECT_EQ(Refused(file, {.common_name = "a\x1b[2Jb\n"}).find('\x1b'), std::string::npos);
}

TEST(AccessFileTest, MistakesAreNamed) {
  EXPECT_THAT(Complaint("certificates:\n  - {dns: a, role: king, name: a}"),
              HasSubstr("access.yaml: line 2: role: king is none of"));
  EXPECT_THAT(Complaint("certificates: [{dns: a, role: user}]"), HasSubstr("is no name"));
  EXPECT_THAT(Complaint("certificates: [{dns: a, name: a}]"), HasSubstr("role is missing"));
  EXPECT_THAT(Complaint("certificates: [{role: user, name: a}]"),
              HasSubstr("uri, dns, email or common_name is missing"));
  EXPECT_THAT(Complaint("certificates: [{dns: a, uri: b, role: user, name: a}]"),
              HasSubstr("give one of"));
  EXPECT_THAT(Complaint("certificates: [{dns: a, rule: user}]"), HasSubstr("unknown key rule"));
  EXPECT_THAT(Complaint("certificates: [{dns: a, role: node, name: a+b}]"),
              HasSubstr("is no node's name"));
  EXPECT_THAT(Complaint("certificates: [a]"), HasSubstr("key: value pairs"));
  EXPECT_THAT(Complaint("certificates: {dns: a}"), HasSubstr("a list"));
  EXPECT_THAT(Complaint("tokens: []"), HasSubstr("unknown key tokens"));
  EXPECT_THAT(Complaint(""), HasSubstr("key: value pairs"));
  EXPECT_THAT(Complaint("certificates: [["), HasSubstr("access.yaml"));
  EXPECT_THAT(Complaint("roles_in_certificates: perhaps"), HasSubstr("access.yaml"));
}

TEST(AccessFileTest, OnlyAFileOfReasonableSizeIsRead) {
  const TempDir dir;
  EXPECT_THAT(std::string(AccessFile::Read(dir.File("absent")).status().message()),
              HasSubstr("--access: cannot read"));
  EXPECT_THAT(std::string(AccessFile::Read("/dev/zero").status().message()),
              HasSubstr("--access: /dev/zero is a device; a file is expected"));
  std::ofstream(dir.File("access.yaml")) << "x";
  EXPECT_EQ(*AccessFile::Read(dir.File("access.yaml")), "x");
  std::filesystem::resize_file(dir.File("access.yaml"), (1 << 20) + 1);
  EXPECT_THAT(std::string(AccessFile::Read(dir.File("access.yaml")).status().message()),
              HasSubstr("at most 1048576 are allowed"));
}

}  // namespace
}  // namespace ringleader::access
