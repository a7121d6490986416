#include "worker/agent/log_pump.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace ringleader::agent {
namespace {

// Bytes that continue a character of UTF-8.
bool IsContinuation(char c) {
  return (static_cast<unsigned char>(c) & 0xC0) == 0x80;
}

// Length of the character that starts with this byte; 0 if none does.
size_t CharacterLength(char first) {
  const auto byte = static_cast<unsigned char>(first);
  if (byte < 0x80) return 1;
  if (byte >= 0xC2 && byte < 0xE0) return 2;
  if (byte >= 0xE0 && byte < 0xF0) return 3;
  if (byte >= 0xF0 && byte < 0xF5) return 4;
  return 0;
}

bool ValidCharacter(std::string_view text) {
  for (size_t i = 1; i < text.size(); ++i) {
    if (!IsContinuation(text[i])) return false;
  }
  const auto first = static_cast<unsigned char>(text[0]);
  const auto second = text.size() > 1 ? static_cast<unsigned char>(text[1]) : 0;
  // Overlong forms, surrogates, and what lies beyond Unicode.
  if (first == 0xE0 && second < 0xA0) return false;
  if (first == 0xED && second >= 0xA0) return false;
  if (first == 0xF0 && second < 0x90) return false;
  return !(first == 0xF4 && second >= 0x90);
}

std::string Printable(std::string text) {
  for (size_t i = 0; i < text.size();) {
    const size_t length = CharacterLength(text[i]);
    if (length == 0 || i + length > text.size() ||
        !ValidCharacter(std::string_view(text).substr(i, length))) {
      text[i++] = '?';
    } else {
      i += length;
    }
  }
  return text;
}

}  // namespace

void LineSplitter::Add(std::string_view bytes, std::vector<std::string>* lines) {
  for (const char c : bytes) {
    if (c == '\n') {
      if (!partial_.empty() && partial_.back() == '\r') partial_.pop_back();
      lines->push_back(Printable(std::exchange(partial_, {})));
      continue;
    }
    // Not inside a character, if it is one.
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
