#include "base/process/turn_queue.h"

#include <utility>

namespace ringleader {

void TurnQueue::Push(const std::string& client, std::function<void()> task) {
  std::deque<std::function<void()>>& own = tasks_[client];
  if (own.empty() && !held_.contains(client)) turns_.push_back(client);
  own.push_back(std::move(task));
}

std::function<void()> TurnQueue::Pop(std::string* client) {
  std::string next = std::move(turns_.front());
  turns_.pop_front();
  const auto own = tasks_.find(next);
  std::function<void()> task = std::move(own->second.front());
  own->second.pop_front();
  if (own->second.empty()) {
    tasks_.erase(own);
  } else {
    turns_.push_back(next);
  }
  if (client != nullptr) *client = std::move(next);
  return task;
}

void TurnQueue::Hold(const std::string& client) {
  held_.insert(client);
  std::erase(turns_, client);
}

void TurnQueue::Release(const std::string& client) {
  if (held_.erase(client) > 0 && tasks_.contains(client)) turns_.push_back(client);
}

size_t TurnQueue::TasksOf(const std::string& client) const {
  const auto own = tasks_.find(client);
  return own == tasks_.end() ? 0 : own->second.size();
}

}  // namespace ringleader
