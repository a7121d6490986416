// The same calls many times.
#include <gtest/gtest.h>

#include <vector>

#include "kernels/sm90/testing/attention_problem.h"

namespace ringleader::kernels::sm90 {
namespace {

// The order of sums varies from run to run, and with it the last bits of gradients; nothing else.
TEST(AttentionRepeatTest, NoOutlierIn1000Runs) {
  if (!fused::HaveGpu()) GTEST_SKIP() << "no GPU";
  // Two work items a block of keys, so that dk and dv are sums of several, too.
  const Case c = {.name = "Repeat",
                  .tokens = 1000,
                  .heads = 8,
                  .kv_heads = 1,
                  .pattern = TilePattern::kToeplitz};
  const Lists lists(c);
  const Problem p(c);
  const QueryShard& rank = p.queries[0];
  const KeyShard& owner = p.keys[0];
  const std::vector<float> no_lse(rank.lse.size(), kMinusInfinity);
  std::vector<float> first_out, first_lse, first_dq, first_dk, first_dv;
  for (int run = 0; run < (fused::SmallShapes() ? 3 : 1000); ++run) {
    for (const DeviceBuffer<float>* zeroed : {&rank.out, &rank.dq, &owner.dk, &owner.dv}) {
      fused::CheckCuda(cudaMemset(zeroed->data(), 0, zeroed->Bytes()), "cudaMemset");
    }
    fused::CheckCuda(
        cudaMemcpy(rank.lse.data(), no_lse.data(), rank.lse.Bytes(), cudaMemcpyHostToDevice),
        "cudaMemcpy");
    ASSERT_NO_FATAL_FAILURE(p.Forward(rank, owner, lists.gpu));
    if (run == 0) p.ComputeDelta(rank);
    ASSERT_NO_FATAL_FAILURE(p.Backward(rank, owner, lists.gpu));
    const std::vector<float> out = rank.out.Read(), lse = rank.lse.Read(), dq = rank.dq.Read(),
                             dk = owner.dk.Read(), dv = owner.dv.Read();
    if (run == 0) {
      first_out = out, first_lse = lse, first_dq = dq, first_dk = dk, first_dv = dv;
      continue;
    }
    ASSERT_EQ(out, first_out) << "run " << run;
    ASSERT_EQ(lse, first_lse) << "run " << run;
    ASSERT_LT(RelativeNorm(dq, first_dq), 1e-5) << "run " << run;
    ASSERT_LT(RelativeNorm(dk, first_dk), 1e-5) << "run " << run;
    ASSERT_LT(RelativeNorm(dv, first_dv), 1e-5) << "run " << run;
  }
}

}  // namespace
}  // namespace ringleader::kernels::sm90
