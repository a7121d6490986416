#include "kernels/reference/math/engine.h"

#include <new>

namespace ringleader::kernels::reference {

namespace {
constexpr std::align_val_t kCacheLine{64};
}

void Scratch::Free::operator()(float* p) const {
  ::operator delete[](p, kCacheLine);
}

float* Scratch::Reserve(size_t floats) {
  if (floats > capacity_) {
    data_.reset();
    data_.reset(static_cast<float*>(::operator new[](floats * sizeof(float), kCacheLine)));
    capacity_ = floats;
  }
  return data_.get();
}

}  // namespace ringleader::kernels::reference
