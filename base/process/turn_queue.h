// Tasks of clients that take turns, so that one who asks for much waits behind nobody but itself.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>

namespace ringleader {

// Tasks of one client come in order. Not thread-safe.
class TurnQueue {
 public:
  void Push(const std::string& client, std::function<void()> task);
  // The next one, and in *client, if given, whose it is; the queue must not be empty.
  std::function<void()> Pop(std::string* client = nullptr);
  // Whether there is none to pop.
  bool empty() const { return turns_.empty(); }
  size_t TasksOf(const std::string& client) const;

  // No task of this client is popped until Release(), after which it has the last turn.
  void Hold(const std::string& client);
  void Release(const std::string& client);

 private:
  std::map<std::string, std::deque<std::function<void()>>> tasks_;  // none is empty
  std::deque<std::string> turns_;  // clients with tasks, but for those that are held
  std::set<std::string> held_;
};

}  // namespace ringleader
