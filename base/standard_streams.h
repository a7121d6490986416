// Standard input, output and error of a process.
#pragma once

namespace ringleader {

// Takes the descriptors 0, 1 and 2 where whoever started the process closed them (`2>&-`, some
// supervisors): a file or a socket that is opened later would get such a number, and what is
// logged or printed would be written into it. Reading from and writing to a stream that was closed
// fails as before. What a library opened before main() keeps its number: gRPC has an eventfd, which
// at most gets one of them. Called first of all in main(); ends the process with 70 where even
// /dev/null cannot be opened.
void TakeStandardStreams();

}  // namespace ringleader
