#include "worker/optim/adamw.h"

#include <cmath>

namespace ringleader::optim {

AdamWPass::AdamWPass(const AdamWOptions& options, double learning_rate, double weight_decay,
                     int64_t step, double scale)
    : beta1_(static_cast<float>(options.beta1)),
      beta2_(static_cast<float>(options.beta2)),
      epsilon_(static_cast<float>(options.epsilon)),
      rate_(static_cast<float>(learning_rate /
                               (1.0 - std::pow(options.beta1, static_cast<double>(step))))),
      root_(static_cast<float>(
          1.0 / std::sqrt(1.0 - std::pow(options.beta2, static_cast<double>(step))))),
      // Decay is decoupled from the gradient: weights shrink by it before the update.
      kept_(static_cast<float>(1.0 - learning_rate * weight_decay)),
      scale_(static_cast<float>(scale)) {}

void AdamWPass::Run(float* master, float* m, float* v, const float* gradient, int64_t count) const {
  // Copies, so that the compiler need not take a store for a change of them.
  const float beta1 = beta1_, beta2 = beta2_, epsilon = epsilon_;
  const float rate = rate_, root = root_, kept = kept_, scale = scale_;
  for (int64_t i = 0; i < count; ++i) {
    const float g = gradient[i] * scale;
    m[i] = beta1 * m[i] + (1.0f - beta1) * g;
    v[i] = beta2 * v[i] + (1.0f - beta2) * g * g;
    master[i] = master[i] * kept - rate * m[i] / (std::sqrt(v[i]) * root + epsilon);
  }
}

double SumOfSquares(const float* values, int64_t count) {
  // Independent partial sums let the compiler use vector registers; their order is fixed.
  constexpr int64_t kLanes = 16;
  double partial[kLanes] = {};
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      partial[lane] += static_cast<double>(values[i + lane]) * values[i + lane];
    }
  }
  double sum = 0.0;
  for (const double value : partial) sum += value;
  for (int64_t i = whole; i < count; ++i) sum += static_cast<double>(values[i]) * values[i];
  return sum;
}

}  // namespace ringleader::optim
