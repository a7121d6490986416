// mask_bench [--csv FILE] [--commit NAME] [--tokens N]: every mask of kernels/masks/ as intervals
// of keys, forward and backward, with 64 query heads and 8 KV heads of dimension 128; beside it in
// the same run, where there is one, the instance that has the mask built in (`own`), and cuDNN
// through LibTorch. TFLOP/s count visible pairs: 4 d FLOPs each forward, 10 d backward. What a call
// makes of the intervals is in its time. `ratio` is to the best of the others.
//
// Documents: log-even lengths of 128 to 8192 tokens, from a fixed seed. `blocks` rows: causal lists
// of blocks of 128, a share of them at random.
#include <dlfcn.h>
#include <torch/autograd.h>
#include <torch/cuda.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "bench/length_distributions.h"
#include "kernels/bench/bench_report.h"
#include "kernels/masks/masks.h"
#include "kernels/ops/token_view.h"
#include "kernels/sm90/attention.h"

namespace ringleader::kernels::bench {
namespace {

constexpr int kRepeats = 9, kHeads = 64, kKvHeads = 8, kHeadDim = 128;
constexpr int32_t kWindow = 1024, kBlock = 1024;

struct Milliseconds {
  double forward, backward;
};

template <typename T>
TokenMajor<T> View(const at::Tensor& tensor) {
  return ops::TokenView(tensor, static_cast<T*>(tensor.data_ptr()));
}

at::Tensor Upload(const void* data, int64_t bytes) {
  const at::Tensor on_host =
      at::from_blob(const_cast<void*>(data), {bytes}, at::TensorOptions().dtype(at::kByte));
  return on_host.to(at::kCUDA);
}

class MaskBench {
 public:
  MaskBench(int32_t tokens, Report& report)
      : tokens_(tokens),
        report_(report),
        q_(Random(kHeads)),
        k_(Random(kKvHeads)),
        v_(Random(kKvHeads)),
        d_out_(Random(kHeads)),
        out_(Zeros(kHeads)),
        dq_(Zeros(kHeads)),
        dk_(Zeros(kKvHeads)),
        dv_(Zeros(kKvHeads)),
        lse_(at::empty({kHeads, tokens}, Floats())),
        workspace_(at::empty({std::max(int64_t{1} << 28, int64_t{2048} * tokens)},
                             at::TensorOptions().device(at::kCUDA).dtype(at::kByte))) {
    ringleader::bench::LengthRandom random(20251123);
    for (int64_t first = 0; first < tokens;) {
      documents_.push_back(static_cast<int32_t>(first));
      first += static_cast<int64_t>(random.Between(128, 8192));
    }
    for (size_t d = 0; d < documents_.size(); ++d) {
      const int32_t end = d + 1 < documents_.size() ? documents_[d + 1] : tokens;
      starts_.resize(end, documents_[d]);
    }
  }

  void Run() {
    const Milliseconds cudnn_full = Cudnn(/*causal=*/false), cudnn_causal = Cudnn(/*causal=*/true);
    for (int kind = 0; kind < kMaskKinds; ++kind) {
      const Mask mask = {
          .kind = static_cast<MaskKind>(kind),
          .window =
              static_cast<MaskKind>(kind) == MaskKind::kGlobalSliding ? tokens_ / 12 : kWindow,
          .prefix = static_cast<MaskKind>(kind) == MaskKind::kPrefixCausal ? tokens_ / 3
                    : documents_.size() > 1                                ? documents_[1] / 2
                                                                           : 0,
          .block = kBlock};
      std::optional<Milliseconds> cudnn;
      if (mask.kind == MaskKind::kFull) cudnn = cudnn_full;
      if (mask.kind == MaskKind::kCausal) cudnn = cudnn_causal;
      const auto rows = IntervalsOf(mask, tokens_, documents_);
      Check(rows.status());
      const at::Tensor intervals =
          Upload(rows->data(), static_cast<int64_t>(rows->size() * sizeof(KeyIntervals)));
      TileSelection tiles = {.pattern = TilePattern::kFull};
      tiles.intervals = static_cast<const KeyIntervals*>(intervals.const_data_ptr());
      Add(std::string(MaskName(mask.kind)), static_cast<double>(VisiblePairs(*rows)) * kHeads,
          Measure(tiles), Own(mask.kind), cudnn);
    }
    for (const double kept : {0.125, 0.5}) Blocks(kept);
  }

 private:
  static at::TensorOptions Floats() {
    return at::TensorOptions().device(at::kCUDA).dtype(at::kFloat);
  }
  at::Tensor Random(int heads) const {
    return at::randn({tokens_, heads, kHeadDim}, Floats().dtype(at::kBFloat16));
  }
  at::Tensor Zeros(int heads) const { return at::zeros({tokens_, heads, kHeadDim}, Floats()); }

  Milliseconds Measure(const TileSelection& tiles) const {
    const ShardLayout whole = {.tokens = tokens_};
    const float scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));
    const sm90::Workspace scratch = {workspace_.data_ptr(), workspace_.numel()};
    const auto forward = [&] {
      lse_.fill_(-std::numeric_limits<float>::infinity());
      Check(sm90::AttentionForward({.q = View<const __nv_bfloat16>(q_),
                                    .k = View<const __nv_bfloat16>(k_),
                                    .v = View<const __nv_bfloat16>(v_),
                                    .out = View<float>(out_),
                                    .lse = lse_.data_ptr<float>(),
                                    .query_layout = whole,
                                    .key_layout = whole,
                                    .tiles = tiles,
                                    .scale = scale},
                                   scratch, nullptr));
    };
    Milliseconds ms = {.forward = MedianMs(forward, kRepeats), .backward = 0};
    const at::Tensor delta = (out_ * d_out_.to(at::kFloat)).sum(-1).transpose(0, 1).contiguous();
    ms.backward = MedianMs(
        [&] {
          Check(sm90::AttentionBackward({.q = View<const __nv_bfloat16>(q_),
                                         .k = View<const __nv_bfloat16>(k_),
                                         .v = View<const __nv_bfloat16>(v_),
                                         .d_out = View<const __nv_bfloat16>(d_out_),
                                         .lse = lse_.data_ptr<float>(),
                                         .delta = delta.data_ptr<float>(),
                                         .dq = View<float>(dq_),
                                         .dk = View<float>(dk_),
                                         .dv = View<float>(dv_),
                                         .query_layout = whole,
                                         .key_layout = whole,
                                         .tiles = tiles,
                                         .scale = scale},
                                        scratch, nullptr));
        },
        kRepeats);
    return ms;
  }

  // The instance that has the mask built in.
  std::optional<Milliseconds> Own(MaskKind kind) const {
    TileSelection tiles;
    at::Tensor starts;
    switch (kind) {
      case MaskKind::kFull:
        tiles.pattern = TilePattern::kFull;
        break;
      case MaskKind::kCausal:
        break;
      case MaskKind::kCausalWindow:
        tiles.pattern = TilePattern::kWindow;
        tiles.window = kWindow;
        break;
      case MaskKind::kCausalDocuments:
        starts = Upload(starts_.data(), static_cast<int64_t>(starts_.size() * sizeof(int32_t)));
        tiles.document_starts = static_cast<const int32_t*>(starts.const_data_ptr());
        break;
      default:
        return std::nullopt;
    }
    return Measure(tiles);
  }

  Milliseconds Cudnn(bool causal) const {
    at::globalContext().setSDPUseFlash(false);
    at::globalContext().setSDPUseMemEfficient(false);
    at::globalContext().setSDPUseMath(false);
    at::globalContext().setSDPUseCuDNN(true);
    const auto input = [&](const at::Tensor& x) {
      return x.transpose(0, 1).unsqueeze(0).detach().clone().requires_grad_();
    };
    const at::Tensor q = input(q_), k = input(k_), v = input(v_);
    const auto attention = [&] {
      return at::scaled_dot_product_attention(q, k, v, {}, 0.0, causal, {}, /*enable_gqa=*/true);
    };
    Milliseconds ms = {};
    {
      const at::NoGradGuard no_grad;
      ms.forward = MedianMs([&] { attention(); }, kRepeats);
    }
    const at::Tensor out = attention(), d_out = at::randn_like(out);
    ms.backward = MedianMs(
        [&] {
          torch::autograd::grad({out}, {q, k, v}, {d_out}, /*retain_graph=*/true);
        },
        kRepeats);
    return ms;
  }

  // Causal lists of blocks of 128, as intervals and lists, beside kCsr's own causal mask.
  void Blocks(double kept) {
    const int32_t blocks = (tokens_ + 127) / 128;
    std::mt19937 random(20251123);
    std::bernoulli_distribution keep(kept);
    std::vector<int32_t> row_offsets, columns, column_offsets, rows;
    double pairs = 0;
    for (int h = 0; h < kHeads; ++h) {
      std::vector<std::vector<int32_t>> by_column(blocks);
      row_offsets.push_back(static_cast<int32_t>(columns.size()));
      for (int32_t a = 0; a < blocks; ++a) {
        for (int32_t b = 0; b <= a; ++b) {
          if (a != b && !keep(random)) continue;
          columns.push_back(b);
          by_column[b].push_back(a);
          pairs += a == b ? 64.0 * 129.0 : 128.0 * 128.0;
        }
        row_offsets.push_back(static_cast<int32_t>(columns.size()));
      }
      column_offsets.push_back(static_cast<int32_t>(rows.size()));
      for (const auto& list : by_column) {
        rows.insert(rows.end(), list.begin(), list.end());
        column_offsets.push_back(static_cast<int32_t>(rows.size()));
      }
    }
    const auto upload = [](const std::vector<int32_t>& list) {
      return Upload(list.data(), static_cast<int64_t>(list.size() * sizeof(int32_t)));
    };
    const at::Tensor lists[] = {upload(row_offsets), upload(columns), upload(column_offsets),
                                upload(rows)};
    const auto list = [&](int i) { return static_cast<const int32_t*>(lists[i].const_data_ptr()); };
    TileSelection tiles = {.pattern = TilePattern::kCsr,
                           .row_offsets = list(0),
                           .columns = list(1),
                           .column_offsets = list(2),
                           .rows = list(3)};
    const Milliseconds own = Measure(tiles);
    const auto causal = IntervalsOf({.kind = MaskKind::kCausal}, tokens_, {});
    const at::Tensor intervals =
        Upload(causal->data(), static_cast<int64_t>(causal->size() * sizeof(KeyIntervals)));
    tiles.intervals = static_cast<const KeyIntervals*>(intervals.const_data_ptr());
    Add(absl::StrFormat("blocks %.1f %%", 100 * kept), pairs, Measure(tiles), own, std::nullopt);
  }

  void Add(const std::string& mask, double pairs, const Milliseconds& ms,
           const std::optional<Milliseconds>& own, const std::optional<Milliseconds>& cudnn) {
    const auto direction = [&](const char* name, double flops, double Milliseconds::*of) {
      const auto tflops = [&](const std::optional<Milliseconds>& x) {
        return x ? flops * kHeadDim * pairs / ((*x).*of) * 1e-9 : 0.0;
      };
      const auto text = [](double x) { return x > 0 ? absl::StrFormat("%.1f", x) : ""; };
      const double best = std::max(tflops(own), tflops(cudnn));
      report_.Add({mask, name, absl::StrFormat("%d", tokens_),
                   absl::StrFormat("%.3f", pairs / kHeads / tokens_ / tokens_),
                   absl::StrFormat("%.3f", ms.*of), text(tflops(ms)), text(tflops(own)),
                   text(tflops(cudnn)),
                   best > 0 ? absl::StrFormat("%.3f", tflops(ms) / best) : ""});
    };
    direction("forward", 4, &Milliseconds::forward);
    direction("backward", 10, &Milliseconds::backward);
  }

  const int32_t tokens_;
  Report& report_;
  std::vector<int32_t> documents_, starts_;
  const at::Tensor q_, k_, v_, d_out_, out_, dq_, dk_, dv_, lse_, workspace_;
};

int Main(int argc, char** argv) {
  const Flags flags = ParseFlags(argc, argv);
  int tokens = 32768;
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], "--tokens") == 0) tokens = std::atoi(argv[i + 1]);
  }
  if (tokens < 128 || tokens > 1 << 20) {
    std::fprintf(stderr, "mask_bench: --tokens is %d; allowed are 128 to 1048576\n", tokens);
    return 2;
  }
  // Registers LibTorch's CUDA backend where it is installed; the program links the CPU part alone.
  if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr ||
      !torch::cuda::is_available()) {
    std::printf("mask_bench: SKIPPED, no GPU or no LibTorch with CUDA\n");
    return 0;
  }
  Report report(flags, {"mask", "direction", "tokens", "share", "ms", "tflops", "own_tflops",
                        "cudnn_tflops", "ratio"});
  MaskBench(tokens, report).Run();
  return 0;
}

}  // namespace
}  // namespace ringleader::kernels::bench

int main(int argc, char** argv) {
  return ringleader::kernels::bench::Main(argc, argv);
}
