#include "kernels/reference/testing/attention_problem.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <utility>

#include "kernels/reference/attention.h"

namespace ringleader::kernels::reference::testing {
namespace {

// Gathered keys and values of the columns of an AttentionProblem, and their gradients.
struct ColumnPass {
  const AttentionProblem& problem;
  const ColumnSelection& columns;
  const TileSelection& tiles;
  std::vector<float> keys, values, d_keys, d_values;

  ColumnPass(const AttentionProblem& problem, const ColumnSelection& columns,
             const TileSelection& tiles)
      : problem(problem), columns(columns), tiles(tiles) {
    const Tensor& q = problem.q;
    const size_t size = int64_t{q.heads} * columns.max_columns * q.head_dim;
    for (std::vector<float>* x : {&keys, &values, &d_keys, &d_values}) x->resize(size);
    GatherColumns(problem.k.view(), problem.v.view(), problem.layout(), columns, q.heads,
                  keys.data(), values.data());
  }

  absl::Status Forward(Engine& engine, AttentionResult& r) const {
    return ColumnForward(engine, {.q = problem.q.view(),
                                  .keys = keys.data(),
                                  .values = values.data(),
                                  .columns = columns,
                                  .tiles = tiles,
                                  .query_layout = problem.layout(),
                                  .out = r.out.view(),
                                  .lse = r.lse.data(),
                                  .scale = problem.scale});
  }

  absl::Status Backward(Engine& engine, const std::vector<float>& delta, AttentionResult& r) {
    absl::Status status = ColumnBackward(engine, {.q = problem.q.view(),
                                                  .d_out = problem.d_out.view(),
                                                  .keys = keys.data(),
                                                  .values = values.data(),
                                                  .columns = columns,
                                                  .tiles = tiles,
                                                  .query_layout = problem.layout(),
                                                  .lse = r.lse.data(),
                                                  .delta = delta.data(),
                                                  .dq = r.dq.view(),
                                                  .d_keys = d_keys.data(),
                                                  .d_values = d_values.data(),
                                                  .scale = problem.scale});
    ScatterColumns(d_keys.data(), d_values.data(), problem.layout(), columns, problem.q.heads,
                   r.dk.view(), r.dv.view());
    return status;
  }
};

}  // namespace

AttentionProblem::AttentionProblem(int64_t tokens, int heads, int kv_heads, int head_dim, int seed)
    : q(0, 0, 0),
      k(0, 0, 0),
      v(0, 0, 0),
      d_out(0, 0, 0),
      scale(1.0f / std::sqrt(static_cast<float>(head_dim))) {
  std::mt19937 random(seed);
  q = RandomTensor(tokens, heads, head_dim, random);
  k = RandomTensor(tokens, kv_heads, head_dim, random);
  v = RandomTensor(tokens, kv_heads, head_dim, random);
  d_out = RandomTensor(tokens, heads, head_dim, random);
}

AttentionResult AttentionProblem::Run(Engine& engine, const TileSelection& tiles,
                                      const ColumnSelection* columns) const {
  const int64_t n = q.tokens;
  AttentionResult r{Tensor(n, q.heads, q.head_dim), Tensor(n, q.heads, q.head_dim),
                    Tensor(n, k.heads, q.head_dim), Tensor(n, k.heads, q.head_dim),
                    std::vector<float>(n * q.heads, -std::numeric_limits<float>::infinity())};
  absl::Status status = AttentionForward(engine, {.q = q.view(),
                                                  .k = k.view(),
                                                  .v = v.view(),
                                                  .out = r.out.view(),
                                                  .lse = r.lse.data(),
                                                  .query_layout = layout(),
                                                  .key_layout = layout(),
                                                  .tiles = tiles,
                                                  .scale = scale});
  EXPECT_TRUE(status.ok()) << status;
  std::optional<ColumnPass> pass;
  if (columns != nullptr) {
    pass.emplace(*this, *columns, tiles);
    status = pass->Forward(engine, r);
    EXPECT_TRUE(status.ok()) << status;
  }
  std::vector<float> delta(n * q.heads);
  AttentionDelta(engine, d_out.view(), std::as_const(r.out).view(), delta.data());
  if (pass.has_value()) {
    status = pass->Backward(engine, delta, r);
    EXPECT_TRUE(status.ok()) << status;
  }
  status = AttentionBackward(engine, {.q = q.view(),
                                      .k = k.view(),
                                      .v = v.view(),
                                      .d_out = d_out.view(),
                                      .lse = r.lse.data(),
                                      .delta = delta.data(),
                                      .dq = r.dq.view(),
                                      .dk = r.dk.view(),
                                      .dv = r.dv.view(),
                                      .query_layout = layout(),
                                      .key_layout = layout(),
                                      .tiles = tiles,
                                      .scale = scale});
  EXPECT_TRUE(status.ok()) << status;
  return r;
}

MaskedAttention AttentionProblem::Expected(const Visible& visible) const {
  return ComputeMaskedAttention(q, k, v, d_out, scale, visible);
}

void ExpectNear(const AttentionResult& actual, const MaskedAttention& expected) {
  constexpr double kTolerance = 1e-5;
  EXPECT_LT(RelativeError(actual.out.data, expected.out), kTolerance);
  EXPECT_LT(RelativeError(actual.lse, expected.lse), kTolerance);
  EXPECT_LT(RelativeError(actual.dq.data, expected.dq), kTolerance);
  EXPECT_LT(RelativeError(actual.dk.data, expected.dk), kTolerance);
  EXPECT_LT(RelativeError(actual.dv.data, expected.dv), kTolerance);
}

}  // namespace ringleader::kernels::reference::testing
