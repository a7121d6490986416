// Orderly shutdown: SIGTERM, SIGINT and SIGHUP as an event that main() waits for. SIGHUP is what a
// terminal's end sends: checkpoints are written then as after SIGTERM. Where it is ignored (nohup)
// it stays ignored.
#pragma once

namespace ringleader {

// Call in main() of every program, before it writes: a file that would grow beyond a limit of the
// process (ulimit -f) or of the file system fails the write, as a full disk does, with EFBIG. By
// default SIGXFSZ ends the process without a word.
void FailTooLargeWrites();

// Call in main() before any thread starts: blocks these signals in this thread and all that it
// will start, and ignores SIGPIPE.
void BlockShutdownSignals();

// Waits for the first of them and returns it. A second one then ends the process at once, by its
// default action.
int WaitForShutdownSignal();

}  // namespace ringleader
