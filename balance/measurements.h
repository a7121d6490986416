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
  double budget_seconds = 0;  // 0: nothing is to be measured
  // Machines whose figures are known: attention of the job's shape, and links of two kinds.
  std::vector<MachineKind> known_layers = {};
  std::vector<MachineKind> known_links_inside = {};
  std::vector<MachineKind> known_links_between = {};
};

// A transfer of b bytes takes latency_seconds + b / bytes_per_second.
struct LinkSpeed {
  bool between_nodes = false;
  double bytes_per_second = 0;
  double latency_seconds = 0;
};

struct Measurements {
  MachineKind machine = {};
  std::vector<Row> rows = {};  // of the job's shape
  std::vector<LinkSpeed> links = {};
};

}  // namespace ringleader::balance
