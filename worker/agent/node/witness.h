// Whoever is left to say that a worker was killed: a small process on the same machine.
//
// The worker and each of its trainers hold the write end of one pipe, the witness the read end. The
// kernel closes an end only when its process is gone, so the end of the pipe proves that all of
// them are dead, however they died and whatever the network does; only then is the coordinator told
// (WorkerControl.ReportDeath). A lost connection proves nothing of the kind.
//
// The witness is no child of the worker, has a session and a name of its own, and holds no file of
// it, so that a kill of the worker, its group or its name leaves it alone.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "base/net/tls.h"

namespace ringleader::agent {

struct WitnessOptions {
  std::string coordinator;  // host:port
  std::string node;         // id, without "nodes/"
  std::string incarnation;  // of this worker process
  TlsOptions tls;
};

class Witness {
 public:
  // Starts it, before this process has threads or connections. The program must hand over to
  // RunWitness() when IsWitness().
  static absl::StatusOr<Witness> Start(const WitnessOptions& options);

  Witness(Witness&& other) noexcept;
  Witness& operator=(Witness&&) = delete;
  // Dismisses it: this process ends in order, and its trainers have ended.
  ~Witness();

  // Every trainer must inherit it.
  int life_fd() const { return life_fd_; }

 private:
  explicit Witness(int life_fd) : life_fd_(life_fd) {}

  int life_fd_ = -1;
};

// Whether a program that was started like this is to be a witness.
bool IsWitness(int argc, char** argv);
// The witness's main function.
int RunWitness();

}  // namespace ringleader::agent
