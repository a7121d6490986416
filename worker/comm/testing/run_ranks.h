// RunRanks of local_communicator.h.
#pragma once

#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "worker/comm/testing/local_communicator.h"

namespace ringleader::comm::testing {

template <typename Body>
void RunRanks(int ranks, Body body) {
  std::vector<std::unique_ptr<Communicator>> communicators = LocalCommunicators(ranks);
  std::mutex mutex;
  std::exception_ptr first_error;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, communicator = communicators[rank].get()] {
      try {
        body(*communicator);
      } catch (...) {
        {
          std::lock_guard lock(mutex);
          if (first_error == nullptr) first_error = std::current_exception();
        }
        communicator->Abort("its test body threw");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first_error != nullptr) std::rethrow_exception(first_error);
}

}  // namespace ringleader::comm::testing
