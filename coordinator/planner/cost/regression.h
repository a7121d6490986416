// Least squares for a stream of observations: non-negative coefficients, a prior, and forgetting.
#pragma once

#include <array>

namespace ringleader::planner {

// Fits seconds = sum_k coefficient[k] * feature[k]. Each observation counts by its relative error,
// so that short and long phases weigh alike; older ones fade by `forgetting` per observation. A
// ridge pulls towards the prior with the weight of `prior_observations` observations, which settles
// what the data leave open (features that never vary apart). A prior of 0 switches a feature off.
class NonNegativeRegression {
 public:
  static constexpr int kFeatures = 4;
  using Vector = std::array<double, kFeatures>;

  explicit NonNegativeRegression(const Vector& prior, double prior_observations = 0.01,
                                 double forgetting = 0.98);

  // As it was before anything was observed.
  NonNegativeRegression Unfitted() const {
    return NonNegativeRegression(prior_, ridge_, forgetting_);
  }

  // Ignored unless `seconds` is finite and positive and no feature is negative.
  void Observe(const Vector& features, double seconds);

  const Vector& coefficients() const { return coefficients_; }
  double Predict(const Vector& features) const;
  int observations() const { return observations_; }

 private:
  void Solve();

  Vector prior_;
  double ridge_;
  double forgetting_;
  // Normal equations in units of the prior: gram u = moment, coefficient = u * prior.
  std::array<Vector, kFeatures> gram_{};
  Vector moment_{};
  Vector coefficients_;
  double weight_ = 0;  // of all observations, after forgetting
  int observations_ = 0;
};

}  // namespace ringleader::planner
