#include "model_shape/rope_frequencies.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace ringleader::model {
namespace {

// The (fractional) frequency index that turns `rotations` times over the pretrained length.
double YarnCorrectionIndex(const RopeConfig& rope, double dims, double rotations) {
  return dims * std::log(rope.original_max_positions / (rotations * 2.0 * std::numbers::pi)) /
         (2.0 * std::log(rope.theta));
}

// Keeps fast frequencies, interpolates slow ones, ramps between.
void ApplyYarn(const RopeConfig& rope, double dims, std::vector<double>& inverse) {
  double low = YarnCorrectionIndex(rope, dims, rope.beta_fast);
  double high = YarnCorrectionIndex(rope, dims, rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dims - 1.0);
  if (low == high) high += 0.001;  // a ramp without width would divide by zero
  for (size_t i = 0; i < inverse.size(); ++i) {
    const double interpolated = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    inverse[i] *= (1.0 - interpolated) + interpolated / rope.factor;
  }
}

// Scales frequencies by their wavelength: short ones stay, those beyond the pretrained length
// shrink by `factor`, linear in frequency between.
void ApplyLlama3(const RopeConfig& rope, std::vector<double>& inverse) {
  for (double& frequency : inverse) {
    const double turns = rope.original_max_positions * frequency / (2.0 * std::numbers::pi);
    const double kept = std::clamp((turns - rope.low_frequency_factor) /
                                       (rope.high_frequency_factor - rope.low_frequency_factor),
                                   0.0, 1.0);
    frequency *= kept + (1.0 - kept) / rope.factor;
  }
}

}  // namespace

RopeFrequencies ComputeRopeFrequencies(const ModelConfig& config, int64_t sequence_length) {
  const RopeConfig& rope = config.rope;
  const double dims = static_cast<double>(config.head_dim);
  double theta = rope.theta;
  if (rope.scaling == RopeScaling::kDynamic && sequence_length > rope.original_max_positions &&
      config.head_dim > 2) {
    const double stretch = static_cast<double>(sequence_length) / rope.original_max_positions;
    theta *= std::pow(rope.factor * stretch - (rope.factor - 1.0), dims / (dims - 2.0));
  }

  // Computed in fp64 and rounded once at the end.
  std::vector<double> inverse(config.head_dim / 2);
  for (size_t i = 0; i < inverse.size(); ++i) {
    inverse[i] = std::pow(theta, -2.0 * static_cast<double>(i) / dims);
  }
  RopeFrequencies result;
  switch (rope.scaling) {
    case RopeScaling::kDefault:
    case RopeScaling::kDynamic:
      break;
    case RopeScaling::kLinear:
      for (double& frequency : inverse) frequency /= rope.factor;
      break;
    case RopeScaling::kYarn:
      ApplyYarn(rope, dims, inverse);
      result.attention_factor = rope.attention_factor;
      break;
    case RopeScaling::kLlama3:
      ApplyLlama3(rope, inverse);
      break;
  }
  result.inverse.assign(inverse.begin(), inverse.end());
  return result;
}

}  // namespace ringleader::model
