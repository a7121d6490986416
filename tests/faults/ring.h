// Lock step between the ranks of the fake trainer: rank 0 waits for all, then lets all go on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ringleader::faults {

// Plain TCP. Not thread-safe.
class Ring {
 public:
  Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring();

  // Returns the port that was picked; 0 on failure.
  int Listen();
  // Joins rank 0, or as rank 0 waits for all others. False if that fails.
  bool Connect(uint32_t rank, const std::vector<std::string>& addresses);
  // True if any rank passed `flag` in this round. Returns false when a rank is gone.
  bool Barrier(bool flag, bool* any);

 private:
  int listener_ = -1;
  uint32_t rank_ = 0;
  std::vector<int> peers_;  // rank 0: all others; otherwise rank 0 alone
};

}  // namespace ringleader::faults
