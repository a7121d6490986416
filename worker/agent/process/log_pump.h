// Reads the output of all trainers line by line, on one thread.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ringleader::agent {

// Cuts a stream of bytes into lines. Bytes that are no UTF-8 become '?', so that a line is a valid
// protobuf string; a line longer than kMaxLineBytes is cut into several.
class LineSplitter {
 public:
  static constexpr size_t kMaxLineBytes = 8192;

  // Appends the lines that `bytes` completes, without their line ends.
  void Add(std::string_view bytes, std::vector<std::string>* lines);
  // The unfinished last line, if there is one.
  void Finish(std::vector<std::string>* lines);

 private:
  std::string partial_;
};

// Thread-safe.
class LogPump {
 public:
  // `lines` of one pipe, as they come; `end`: there will be no more. Called on the pump's thread.
  using Receiver = std::function<void(std::vector<std::string> lines, bool end)>;

  LogPump();
  ~LogPump();  // drops what was not read

  // Takes over the read end of a pipe, which must not block.
  void Add(int fd, Receiver receiver);

 private:
  struct Source {
    LineSplitter splitter;
    Receiver receiver;
  };

  void Run();
  // Returns false at the end of the pipe.
  bool Drain(int fd, Source& source);
  void WakeUp();

  int wake_[2] = {-1, -1};  // a pipe: written to when there is something new to wait for
  absl::Mutex mutex_;
  std::map<int, Source> added_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace ringleader::agent
