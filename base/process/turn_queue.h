// Tasks of clients that take turns, so that one who asks for much waits behind nobody but itself.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <string>

namespace ringleader {

// Tasks of one client come in order. Not thread-safe.
class TurnQueue {
 public:
  void Push(const std::string& client, std::function<void()> task);
  // The next one; there must be one.
  std::function<void()> Pop();
  bool empty() const { return turns_.empty(); }
  size_t TasksOf(const std::string& client) const;

 private:
  std::map<std::string, std::deque<std::function<void()>>> tasks_;  // none is empty
  std::deque<std::string> turns_;                                   // clients with tasks
};

}  // namespace ringleader
