// Between a worker and the trainers that it starts as other users of the machine.
#pragma once

namespace ringleader {

// The environment variable that holds TrainerHello.secret: other users cannot read a process's
// environment, as they can its command line.
inline constexpr char kTrainerSecretVariable[] = "RINGLEADER_TRAINER_SECRET";

}  // namespace ringleader
