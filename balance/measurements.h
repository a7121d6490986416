// What rank 0 of an attempt is asked to measure before the first step, and what it measured.
#pragma once

#include <string>
#include <vector>

#include "balance/latency_table.h"

namespace ringleader::balance {

// Measurements of one kind hold for all machines of that kind.
struct MachineKind {
  std::string device = {};  // the GPU's model; "cpu, 4 threads" for the CPU engine
  std::string clocks = {};  // the clock state, as far as the system says
  std::string driver = {};  // of the GPU, or the system's kernel
  std::string build = {};   // of the trainer

  friend bool operator==(const MachineKind&, const MachineKind&) = default;
};

struct MeasureRequest {
  double budget_seconds = 0;                   // 0: nothing is to be measured
  std::vector<MachineKind> known_layers = {};  // that need not be measured again
};

struct Measurements {
  MachineKind machine = {};
  std::vector<Row> rows = {};  // of the job's shape
};

}  // namespace ringleader::balance
