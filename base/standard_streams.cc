#include "base/standard_streams.h"

#include <fcntl.h>
#include <unistd.h>

namespace ringleader {

void TakeStandardStreams() {
  for (int stream = STDIN_FILENO; stream <= STDERR_FILENO; ++stream) {
    if (fcntl(stream, F_GETFD) >= 0) continue;
    // The lowest number is free, so this is `stream`. Opened the wrong way round: to use it fails.
    if (open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY) != stream) _exit(70);
  }
}

}  // namespace ringleader
