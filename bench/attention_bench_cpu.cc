// Attention on the CPU, measured: ours beside LibTorch's scaled_dot_product_attention, and time
// against density. Ratios come from runs that alternate in one process, so that a busy machine
// slows both sides. training_bench --engine cpu measures whole steps, with the share of the index.
//
//   attention_bench_cpu [--tokens N] [--repeats N] [--threads N] [--clock cpu]
//       [--section dense|density]
#include <torch/autograd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/ops/token_view.h"
#include "kernels/reference/attention/attention.h"
#include "kernels/reference/tiles/tile_lists.h"

namespace ringleader::bench {
namespace {

using kernels::TilePattern;
using kernels::TileSelection;
using kernels::TokenMajor;
using kernels::reference::Engine;
using torch::Tensor;

struct Options {
  int64_t tokens = 8192;
  int repeats = 5;
  int threads = 2;
  std::string section;  // empty: all
};

// CLOCK_MONOTONIC, or with --clock cpu the processor time of all threads: on a busy machine the
// better measure, most of all with one thread.
clockid_t measured_clock = CLOCK_MONOTONIC;

double Now() {
  timespec now;
  clock_gettime(measured_clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double Seconds(const std::function<void()>& body) {
  const double start = Now();
  body();
  return Now() - start;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

template <typename T>
TokenMajor<T> View(const Tensor& x) {
  return kernels::ops::TokenView<T>(x, x.data_ptr<std::remove_const_t<T>>());
}

// One sequence on one rank, called without autograd: what the engine itself costs.
struct Problem {
  Tensor q, k, v, d_out, out, lse, delta, dq, dk, dv;
  kernels::ShardLayout layout;
  float scale;

  Problem(int64_t tokens, int heads, int kv_heads, int d)
      : q(torch::randn({tokens, heads, d})),
        k(torch::randn({tokens, kv_heads, d})),
        v(torch::randn({tokens, kv_heads, d})),
        d_out(torch::randn({tokens, heads, d})),
        out(torch::zeros({tokens, heads, d})),
        lse(torch::empty({heads, tokens})),
        delta(torch::empty({heads, tokens})),
        dq(torch::zeros_like(q)),
        dk(torch::zeros_like(k)),
        dv(torch::zeros_like(v)),
        layout{.tokens = tokens},
        scale(1.0f / std::sqrt(static_cast<float>(d))) {}

  double Forward(Engine& engine, const TileSelection& tiles) {
    out.zero_();
    lse.fill_(-INFINITY);
    return Seconds([&] {
      Check(AttentionForward(engine, {.q = View<const float>(q),
                                      .k = View<const float>(k),
                                      .v = View<const float>(v),
                                      .out = View<float>(out),
                                      .lse = lse.data_ptr<float>(),
                                      .query_layout = layout,
                                      .key_layout = layout,
                                      .tiles = tiles,
                                      .scale = scale}));
    });
  }

  double Backward(Engine& engine, const TileSelection& tiles) {
    for (const Tensor& gradient : {dq, dk, dv}) gradient.zero_();
    return Seconds([&] {
      AttentionDelta(engine, View<const float>(d_out), View<const float>(out),
                     delta.data_ptr<float>());
      Check(AttentionBackward(engine, {.q = View<const float>(q),
                                       .k = View<const float>(k),
                                       .v = View<const float>(v),
                                       .d_out = View<const float>(d_out),
                                       .lse = lse.data_ptr<float>(),
                                       .delta = delta.data_ptr<float>(),
                                       .dq = View<float>(dq),
                                       .dk = View<float>(dk),
                                       .dv = View<float>(dv),
                                       .query_layout = layout,
                                       .key_layout = layout,
                                       .tiles = tiles,
                                       .scale = scale}));
    });
  }

  static void Check(const absl::Status& status) {
    TORCH_CHECK(status.ok(), std::string(status.message()));
  }
};

void BenchDense(const Options& options, Engine& engine) {
  std::printf("\n## Dense causal, %lld tokens: ours beside LibTorch's SDPA\n\n",
              static_cast<long long>(options.tokens));
  std::printf(
      "| heads | kv | d | tile | forward ms | SDPA ms | ratio | backward ms | SDPA ms | ratio |\n");
  std::printf("|---|---|---|---|---|---|---|---|---|---|\n");
  struct Shape {
    int heads, kv_heads, d, tile;
  };
  for (const Shape& s :
       {Shape{4, 4, 64, 128}, Shape{4, 4, 128, 128}, Shape{4, 4, 64, 64}, Shape{8, 2, 64, 128}}) {
    Problem problem(options.tokens, s.heads, s.kv_heads, s.d);
    const TileSelection tiles{.pattern = TilePattern::kCausal, .tile = s.tile};
    // LibTorch gets its preferred layout, keys repeated beforehand where heads share them.
    const auto heads_first = [&](const Tensor& x) {
      return x.repeat_interleave(s.heads / x.size(1), 1)
          .transpose(0, 1)
          .unsqueeze(0)
          .contiguous()
          .requires_grad_();
    };
    const Tensor q = heads_first(problem.q), k = heads_first(problem.k), v = heads_first(problem.v);
    const Tensor d_out = problem.d_out.transpose(0, 1).unsqueeze(0).contiguous();
    std::vector<double> forward, backward, their_forward, their_backward, forward_ratio,
        backward_ratio;
    for (int i = 0; i <= options.repeats; ++i) {
      const double f = problem.Forward(engine, tiles), b = problem.Backward(engine, tiles);
      Tensor out;
      const double tf =
          Seconds([&] { out = at::scaled_dot_product_attention(q, k, v, {}, 0.0, true); });
      const double tb = Seconds([&] { torch::autograd::grad({out}, {q, k, v}, {d_out}); });
      if (i == 0) continue;  // warm-up
      forward.push_back(f * 1e3);
      backward.push_back(b * 1e3);
      their_forward.push_back(tf * 1e3);
      their_backward.push_back(tb * 1e3);
      forward_ratio.push_back(tf / f);
      backward_ratio.push_back(tb / b);
    }
    std::printf("| %d | %d | %d | %d | %.0f | %.0f | %.2f | %.0f | %.0f | %.2f |\n", s.heads,
                s.kv_heads, s.d, s.tile, Median(forward), Median(their_forward),
                Median(forward_ratio), Median(backward), Median(their_backward),
                Median(backward_ratio));
  }
  std::printf("\nratio: LibTorch's seconds / ours, median of pairs; above 1 we are faster.\n");
}

// Tiles at random below the diagonal: what skipping costs, without the help of a regular pattern.
struct RandomTiles {
  std::vector<int32_t> row_offsets, columns;
  int64_t causal = 0;

  RandomTiles(int heads, int64_t tiles, double density) {
    std::mt19937 random(1);
    std::uniform_real_distribution<double> uniform;
    for (int head = 0; head < heads; ++head) {
      for (int64_t a = 0; a < tiles; ++a) {
        row_offsets.push_back(static_cast<int32_t>(columns.size()));
        for (int64_t b = 0; b <= a; ++b, ++causal) {
          if (uniform(random) < density) columns.push_back(static_cast<int32_t>(b));
        }
      }
      row_offsets.push_back(static_cast<int32_t>(columns.size()));
    }
  }
};

void BenchDensity(const Options& options, Engine& engine) {
  constexpr int kHeads = 4, kTile = 128;
  std::printf("\n## Time against density, %lld tokens, %d heads, d 64, tile %d, random tiles\n\n",
              static_cast<long long>(options.tokens), kHeads, kTile);
  std::printf(
      "| density | forward ms | of dense | backward ms | of dense |\n|---|---|---|---|---|\n");
  Problem problem(options.tokens, kHeads, 2, 64);
  const int64_t tiles = kernels::reference::TileCount(options.tokens, kTile);
  double dense_forward = 0.0, dense_backward = 0.0;
  for (const double density : {1.0, 0.75, 0.5, 0.25, 0.1, 0.05, 0.0}) {
    const RandomTiles random(kHeads, tiles, density);
    const TileSelection selection{.pattern = TilePattern::kCsr,
                                  .tile = kTile,
                                  .row_offsets = random.row_offsets.data(),
                                  .columns = random.columns.data()};
    std::vector<double> forward, backward;
    for (int i = 0; i < options.repeats; ++i) {
      forward.push_back(problem.Forward(engine, selection) * 1e3);
      backward.push_back(problem.Backward(engine, selection) * 1e3);
    }
    const double f = Median(forward), b = Median(backward);
    if (density == 1.0) dense_forward = f, dense_backward = b;
    std::printf("| %.3f | %.1f | %.3f | %.1f | %.3f |\n",
                static_cast<double>(random.columns.size()) / random.causal, f, f / dense_forward, b,
                b / dense_backward);
  }
}

// The first "model name" of /proc/cpuinfo.
void PrintProcessor() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (!line.starts_with("model name")) continue;
    std::printf("\nProcessor:%s, %u logical\n", line.substr(line.find(':') + 1).c_str(),
                std::thread::hardware_concurrency());
    return;
  }
}

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--tokens") options.tokens = std::stoll(argv[i + 1]);
    if (flag == "--repeats") options.repeats = std::stoi(argv[i + 1]);
    if (flag == "--threads") options.threads = std::stoi(argv[i + 1]);
    if (flag == "--clock" && std::string(argv[i + 1]) == "cpu") {
      measured_clock = CLOCK_PROCESS_CPUTIME_ID;
    }
    if (flag == "--section") options.section = argv[i + 1];
  }
  setvbuf(stdout, nullptr, _IOLBF, 0);
  torch::manual_seed(1);
  at::set_num_threads(options.threads);
  Engine engine(options.threads);
  std::printf("# attention_bench_cpu: %d threads, %s arithmetic, %s time\n", options.threads,
              engine.math().name, measured_clock == CLOCK_MONOTONIC ? "wall" : "processor");
  PrintProcessor();
  const auto wanted = [&](const char* section) {
    return options.section.empty() || options.section == section;
  };
  if (wanted("dense")) BenchDense(options, engine);
  if (wanted("density")) BenchDensity(options, engine);
  return 0;
}

}  // namespace
}  // namespace ringleader::bench

int main(int argc, char** argv) {
  return ringleader::bench::Main(argc, argv);
}
