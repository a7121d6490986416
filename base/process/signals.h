// Orderly shutdown: SIGTERM and SIGINT as an event that main() waits for.
#pragma once

namespace ringleader {

// Call in main() before any thread starts: blocks SIGTERM and SIGINT in this thread and all that it
// will start, and ignores SIGPIPE.
void BlockShutdownSignals();

// Waits for the first of them and returns it. A second one then ends the process at once, by its
// default action.
int WaitForShutdownSignal();

}  // namespace ringleader
