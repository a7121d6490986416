#include "kernels/sm90/hopper.h"

#include "kernels/sm90/common/launch.h"

namespace ringleader::kernels::sm90 {

absl::Status CheckHopper() {
  return MultiprocessorCount().status();
}

}  // namespace ringleader::kernels::sm90
