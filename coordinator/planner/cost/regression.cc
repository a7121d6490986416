#include "coordinator/planner/cost/regression.h"

#include <cmath>
#include <limits>

namespace ringleader::planner {
namespace {

using Vector = NonNegativeRegression::Vector;
constexpr int kN = NonNegativeRegression::kFeatures;

// Solves a u = b over the features in `subset`, by Cholesky; the others are 0. The ridge keeps `a`
// positive definite. False if rounding spoiled that.
bool SolveSubset(const std::array<Vector, kN>& a, const Vector& b, unsigned subset, Vector* u) {
  std::array<int, kN> index{};
  int n = 0;
  for (int k = 0; k < kN; ++k) {
    if (subset >> k & 1) index[n++] = k;
  }
  std::array<Vector, kN> lower{};
  Vector y{};
  for (int i = 0; i < n; ++i) {
    double rest = b[index[i]];
    for (int j = 0; j <= i; ++j) {
      double sum = a[index[i]][index[j]];
      for (int k = 0; k < j; ++k) sum -= lower[i][k] * lower[j][k];
      if (i == j && sum <= 0) return false;
      lower[i][j] = i == j ? std::sqrt(sum) : sum / lower[j][j];
    }
    for (int k = 0; k < i; ++k) rest -= lower[i][k] * y[k];
    y[i] = rest / lower[i][i];
  }
  u->fill(0);
  for (int i = n - 1; i >= 0; --i) {
    double rest = y[i];
    for (int k = i + 1; k < n; ++k) rest -= lower[k][i] * (*u)[index[k]];
    (*u)[index[i]] = rest / lower[i][i];
  }
  return true;
}

}  // namespace

NonNegativeRegression::NonNegativeRegression(const Vector& prior, double prior_observations,
                                             double forgetting)
    : prior_(prior), ridge_(prior_observations), forgetting_(forgetting), coefficients_(prior) {}

void NonNegativeRegression::Observe(const Vector& features, double seconds) {
  if (!std::isfinite(seconds) || seconds <= 0) return;
  Vector scaled;
  for (int k = 0; k < kN; ++k) {
    if (!std::isfinite(features[k]) || features[k] < 0) return;
    scaled[k] = features[k] * prior_[k] / seconds;
  }
  for (int i = 0; i < kN; ++i) {
    for (int j = 0; j < kN; ++j) gram_[i][j] = forgetting_ * gram_[i][j] + scaled[i] * scaled[j];
    moment_[i] = forgetting_ * moment_[i] + scaled[i];
  }
  weight_ = forgetting_ * weight_ + 1;
  ++observations_;
  Solve();
}

void NonNegativeRegression::Solve() {
  // The ridge, relative to how much each feature weighs in the data: pulls u towards 1.
  std::array<Vector, kN> a = gram_;
  Vector b = moment_;
  double scale = 0;
  for (int k = 0; k < kN; ++k) scale += gram_[k][k];
  if (scale <= 0) return;
  for (int k = 0; k < kN; ++k) {
    const double weight = ridge_ * (gram_[k][k] / weight_ + 1e-9 * scale);
    a[k][k] += weight;
    b[k] += weight;
  }
  // Few features: the best non-negative solution is the best of all subsets' solutions that turn
  // out non-negative.
  double best = std::numeric_limits<double>::infinity();
  Vector best_u{};
  for (unsigned subset = 1; subset < 1u << kN; ++subset) {
    Vector u;
    if (!SolveSubset(a, b, subset, &u)) continue;
    bool feasible = true;
    double loss = 0;
    for (int i = 0; i < kN; ++i) {
      feasible &= u[i] >= 0;
      loss -= 2 * u[i] * b[i];
      for (int j = 0; j < kN; ++j) loss += u[i] * a[i][j] * u[j];
    }
    if (feasible && loss < best) {
      best = loss;
      best_u = u;
    }
  }
  if (!std::isfinite(best)) return;
  for (int k = 0; k < kN; ++k) coefficients_[k] = best_u[k] * prior_[k];
}

double NonNegativeRegression::Predict(const Vector& features) const {
  double seconds = 0;
  for (int k = 0; k < kN; ++k) seconds += coefficients_[k] * features[k];
  return seconds;
}

}  // namespace ringleader::planner
