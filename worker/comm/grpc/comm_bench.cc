// Transfer rates between two ranks over gRPC on loopback; both run in this process, on threads.
#include <algorithm>
#include <thread>
#include <vector>

#include "benchmark/benchmark.h"
#include "worker/comm/testing/grpc_communicators.h"
#include "worker/comm/testing/run_ranks.h"

namespace ringleader::comm {
namespace {

// Each rank sends `bytes` to the other and receives as many. Reports the bytes that one rank sends.
void BM_Exchange(benchmark::State& state) {
  const size_t bytes = state.range(0);
  const int rounds = static_cast<int>(std::clamp<size_t>((size_t{64} << 20) / bytes, 4, 1000));
  auto communicators = testing::GrpcCommunicators(2);
  for ([[maybe_unused]] auto _ : state) {
    std::vector<std::thread> threads;
    threads.reserve(communicators.size());
    for (auto& owned : communicators) {
      threads.emplace_back([&, comm = owned.get()] {
        std::vector<char> out(bytes, 1), in(bytes);
        const int peer = 1 - comm->rank();
        for (int round = 0; round < rounds; ++round) {
          comm->SendReceive(Channel::kKvInner, out.data(), bytes, peer, in.data(), bytes, peer)
              ->Wait()
              .IgnoreError();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * rounds * bytes);
  testing::RunRanks(std::move(communicators), [](Communicator&) {});
}
BENCHMARK(BM_Exchange)->RangeMultiplier(64)->Range(64, 16 << 20)->UseRealTime();

}  // namespace
}  // namespace ringleader::comm

BENCHMARK_MAIN();
