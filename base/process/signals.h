// Orderly shutdown: SIGTERM, SIGINT and SIGHUP as an event that main() waits for. SIGHUP is what a
// terminal's end sends: checkpoints are written then as after SIGTERM. Where it is ignored (nohup)
// it stays ignored.
#pragma once

namespace ringleader {

// Call in main() before any thread starts: blocks these signals in this thread and all that it
// will start, and ignores SIGPIPE.
void BlockShutdownSignals();

// Waits for the first of them and returns it. A second one then ends the process at once, by its
// default action.
int WaitForShutdownSignal();

}  // namespace ringleader
