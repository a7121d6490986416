// Runs a test's body once per rank, on threads.
#pragma once

#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "worker/comm/testing/local_communicator.h"

namespace ringleader::comm::testing {

// Runs `body(*communicators[r])` on a thread for every r, waits for all, and then destroys the
// communicators. A rank whose body throws aborts the others; the first exception is rethrown.
template <typename Body>
void RunRanks(std::vector<std::unique_ptr<Communicator>> communicators, Body body) {
  std::mutex mutex;
  std::exception_ptr first_error;
  std::vector<std::thread> threads;
  threads.reserve(communicators.size());
  for (std::unique_ptr<Communicator>& owned : communicators) {
    threads.emplace_back([&, communicator = std::move(owned)] {
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

template <typename Body>
void RunRanks(int ranks, Body body) {
  RunRanks(LocalCommunicators(ranks), body);
}

}  // namespace ringleader::comm::testing
