#include "worker/comm/nccl/nccl_library.h"

#include <dlfcn.h>

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringleader::comm {
namespace {

TEST(NcclLibraryTest, OneThatIsOlderThanItsHeaderIsRefused) {
  // Loaded already, it is what the name stands for in this process.
  ASSERT_NE(dlopen(OLD_NCCL, RTLD_NOW), nullptr) << dlerror();
  const absl::Status refused = LoadNccl().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(refused.message()),
              ::testing::StartsWith("libnccl.so.2 is version 20000 and " +
                                    std::to_string(NCCL_VERSION_CODE) + " or newer is needed"));
}

}  // namespace
}  // namespace ringleader::comm
