#include "base/process/signals.h"

#include <pthread.h>
#include <signal.h>

namespace ringleader {
namespace {

// Blocked signals wait for sigwait() even where they are ignored, so who ignores SIGHUP (nohup)
// would get it all the same.
bool HangUpIsIgnored() {
  struct sigaction action = {};
  return sigaction(SIGHUP, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

sigset_t ShutdownSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  if (!HangUpIsIgnored()) sigaddset(&set, SIGHUP);
  return set;
}

}  // namespace

void FailTooLargeWrites() {
  signal(SIGXFSZ, SIG_IGN);
}

void BlockShutdownSignals() {
  const sigset_t set = ShutdownSignals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);
}

int WaitForShutdownSignal() {
  const sigset_t set = ShutdownSignals();
  int signal_number = 0;
  while (sigwait(&set, &signal_number) != 0) {
  }
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  return signal_number;
}

}  // namespace ringleader
