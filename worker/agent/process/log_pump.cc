#include "worker/agent/process/log_pump.h"

#include <fcntl.h>
#include <google/protobuf/stubs/common.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/text/utf8.h"

namespace ringleader::agent {
namespace {

// Returns the text with '?' for every byte that is part of no UTF-8 character.
std::string Printable(std::string text) {
  std::string copy(text.size(), '\0');
  // Returns `text` itself where there is nothing to replace, else `copy`.
  const char* const valid =
      google::protobuf::internal::UTF8CoerceToStructurallyValid(text, copy.data(), '?');
  return valid == text.data() ? text : copy;
}

}  // namespace

void LineSplitter::Add(std::string_view bytes, std::vector<std::string>* lines) {
  for (const char c : bytes) {
    if (c == '\n') {
      if (!partial_.empty() && partial_.back() == '\r') partial_.pop_back();
      lines->push_back(Printable(std::exchange(partial_, {})));
      continue;
    }
    // A character is not cut in two, if the bytes are one.
    if (partial_.size() >= kMaxLineBytes && !IsContinuation(c)) Finish(lines);
    if (partial_.size() >= 2 * kMaxLineBytes) Finish(lines);
    partial_.push_back(c);
  }
}

void LineSplitter::Finish(std::vector<std::string>* lines) {
  if (!partial_.empty()) lines->push_back(Printable(std::exchange(partial_, {})));
}

LogPump::LogPump() {
  if (pipe2(wake_, O_CLOEXEC | O_NONBLOCK) != 0) wake_[0] = wake_[1] = -1;
  thread_ = std::thread([this] { Run(); });
}

LogPump::~LogPump() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  WakeUp();
  thread_.join();
  close(wake_[0]);
  close(wake_[1]);
}

void LogPump::WakeUp() {
  const char byte = 0;
  (void)!write(wake_[1], &byte, 1);
}

void LogPump::Add(int fd, Receiver receiver) {
  {
    absl::MutexLock lock(&mutex_);
    added_.emplace(fd, Source{.splitter = {}, .receiver = std::move(receiver)});
  }
  WakeUp();
}

bool LogPump::Drain(int fd, Source& source) {
  std::vector<std::string> lines;
  bool end = false;
  char buffer[1 << 16];
  // One buffer a turn: a trainer that floods its log must not starve the others.
  const ssize_t count = read(fd, buffer, sizeof(buffer));
  if (count > 0) {
    source.splitter.Add({buffer, static_cast<size_t>(count)}, &lines);
  } else if (count == 0 || (errno != EAGAIN && errno != EINTR)) {
    source.splitter.Finish(&lines);
    end = true;
  }
  if (!lines.empty() || end) source.receiver(std::move(lines), end);
  return !end;
}

void LogPump::Run() {
  std::map<int, Source> sources;
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      sources.merge(added_);
      if (stopping_) break;
    }
    std::vector<pollfd> waits = {{.fd = wake_[0], .events = POLLIN, .revents = 0}};
    for (const auto& [fd, source] : sources) {
      waits.push_back({.fd = fd, .events = POLLIN, .revents = 0});
    }
    if (poll(waits.data(), waits.size(), -1) < 0) continue;
    char ignored[64];
    while (read(wake_[0], ignored, sizeof(ignored)) > 0) {
    }
    for (const pollfd& wait : waits) {
      if (wait.fd == wake_[0] || wait.revents == 0) continue;
      const auto source = sources.find(wait.fd);
      if (Drain(wait.fd, source->second)) continue;
      close(wait.fd);
      sources.erase(source);
    }
  }
  for (const auto& [fd, source] : sources) close(fd);
}

}  // namespace ringleader::agent
