#!/usr/bin/env python3
"""PyTorch's ring attention under torchrun, in the cells of ringleader-bench: what context_parallel runs for
F.scaled_dot_product_attention, forward and backward, with keys and values that are gathered or sent round.

    torchrun --nproc-per-node 2 bench/longca/rings/peers.py --tokens 32768 131072 --csv FILE

bench/longca/rings/run.sh runs it beside ringleader-bench. Each back end is checked in small against fp64. `--device cpu`
tries it on CPU ranks, in float32 and without heads that share keys; its times are for GPUs alone.
"""

import argparse
import csv
import datetime
import math
import os
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

from picture import picture

COLUMNS = ("mask", "choice", "scheme", "direction", "tokens", "ranks", "note", "max_ms", "max_p20_ms", "max_p80_ms",
           "mean_ms", "mean_p20_ms", "mean_p80_ms", "plan_ms", "with_plan_ms", "gflops", "share", "mib_moved", "mib_whole",
           "imbalance", "peak_mib", "error", "backend", "hardware", "commit", "date")
MASKS = ("full", "causal")  # that context_parallel knows
ROTATIONS = {"all-gather": ring._RotateMethod.ALL_GATHER, "round": ring._RotateMethod.ALL_TO_ALL}
TOLERANCE = {"cuda": 2e-2, "cpu": 1e-4}  # bf16 in, out, and in what backward multiplies; float32
SEED = 20251125


def cudnn(mesh, q, k, v, is_causal):
    out, lse, starts_q, starts_k, most_q, most_k, seed, offset, _ = ring._scaled_dot_product_ring_cudnn_attention(
        mesh, q, k, v, is_causal=is_causal)

    def backward(d_out):
        return ring._scaled_dot_product_ring_cudnn_attention_backward(
            mesh, d_out, q, k, v, out, lse, seed, offset, None, starts_q, starts_k, most_q, most_k, 0.0, is_causal)

    return out, backward


def flash(mesh, q, k, v, is_causal):
    out, lse, starts_q, starts_k, most_q, most_k, seed, offset, _ = ring._scaled_dot_product_ring_flash_attention(
        mesh, q, k, v, is_causal=is_causal)

    def backward(d_out):
        return ring._scaled_dot_product_ring_flash_attention_backward(
            mesh, d_out, q, k, v, out, lse, starts_q, starts_k, most_q, most_k, 0.0, is_causal, seed, offset)

    return out, backward


def flash_on_cpus(mesh, q, k, v, is_causal):
    aten, group = torch.ops.aten, mesh.get_group()
    out, lse = ring._templated_ring_attention(
        group, 2, aten._scaled_dot_product_flash_attention_for_cpu, q, k, v, is_causal=is_causal)

    def backward(d_out):
        return ring._templated_ring_attention_backward(
            group, 2, aten._scaled_dot_product_flash_attention_for_cpu_backward.default, d_out, "grad_out", q, k, v, out, lse,
            is_causal, dropout_p=0.0)

    return out, backward


class Sent:
    """Counts the bytes that this rank sends to others, by PyTorch's collectives of a ring."""

    def __init__(self, ranks):
        self.ranks, self.bytes = ranks, 0

    def __enter__(self):
        self.permute, self.gather = ring.ft_c.permute_tensor, ring.ft_c.all_gather_tensor
        ring.ft_c.permute_tensor = self._counting(self.permute, 1)
        ring.ft_c.all_gather_tensor = self._counting(self.gather, self.ranks - 1)
        return self

    def __exit__(self, *_):
        ring.ft_c.permute_tensor, ring.ft_c.all_gather_tensor = self.permute, self.gather

    def _counting(self, collective, others):
        def call(tensor, *arguments, **named):
            self.bytes += others * tensor.numel() * tensor.element_size()
            return collective(tensor, *arguments, **named)
        return call


BACKENDS = {"cuda": {"cudnn": cudnn, "flash": flash}, "cpu": {"flash": flash_on_cpus}}


def positions_of(rank, ranks, tokens, is_causal):
    """Zig-zag under a causal mask, as context_parallel deals tokens, or else in order."""
    if not is_causal:
        return torch.arange(tokens).chunk(ranks)[rank]
    parts = torch.arange(tokens).chunk(2 * ranks)
    return torch.cat((parts[rank], parts[2 * ranks - 1 - rank]))


def expected(q, k, v, d_out, is_causal):
    """In fp64, of the whole sequence -> out and the gradients."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), d_out.double())


def beside(cells, path):
    """Lines: each of our schemes' fastest cells in the table of ringleader-bench, and the peer's fastest of the same mask,
    direction, length and number of ranks."""
    speed = lambda cell: float(cell["gflops"])
    is_run = lambda cell: not cell.get("note") and cell["choice"] == "all"
    cell_of = lambda cell: (cell["mask"], cell["direction"], int(cell["tokens"]), int(cell["ranks"]))
    with open(path, newline="") as file:
        # Helpers are a baseline that no job runs.
        ours = [cell for cell in csv.DictReader(file) if is_run(cell) and not cell["scheme"].endswith("with helpers")]
    for key in dict.fromkeys(map(cell_of, filter(is_run, cells))):
        peer = max((cell for cell in cells if is_run(cell) and cell_of(cell) == key), key=speed)
        mine = max((cell for cell in ours if cell_of(cell) == key), key=speed, default=None)
        what = "{}, {}, {} tokens, {} ranks".format(*key)
        yield f"{what}: nothing of ours ran" if mine is None else (
            f"{what}: {mine['scheme']} {speed(mine) / 1e3:.4g} TFLOP/s, {peer['scheme']} {speed(peer) / 1e3:.4g}: "
            f"{speed(mine) / speed(peer):.3f} x")


class Bench:
    def __init__(self, flags):
        self.flags, self.device = flags, flags.device
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if self.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        self.mesh = init_device_mesh(self.device, (self.ranks,))
        self.type = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.heads, self.kv_heads = flags.heads

    def random(self, generator, heads, tokens):
        return torch.randn(1, heads, tokens, self.flags.head_dim, generator=generator, device=generator.device).to(self.type)

    def inputs(self, tokens, generator):
        """q, k, v and the gradient of the output."""
        return [self.random(generator, heads, tokens) for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)]

    def gathered(self, part, positions):
        """All ranks' parts of a tensor as one, [1, heads, tokens, head_dim], on the CPU."""
        parts = [None] * self.ranks
        dist.all_gather_object(parts, (part.float().cpu(), positions))
        whole = torch.empty(*part.shape[:2], self.ranks * part.shape[2], part.shape[3])
        for values, where in parts:
            whole[:, :, where] = values
        return whole

    def error(self, attend, is_causal):
        """The largest of outputs' and gradients' difference from fp64, relative to the largest value; infinite where one is
        not finite."""
        tokens = 2 * self.ranks * 128
        whole = self.inputs(tokens, torch.Generator().manual_seed(SEED))
        positions = positions_of(self.rank, self.ranks, tokens, is_causal)
        q, k, v, d_out = (x[:, :, positions].to(self.device).contiguous() for x in whole)
        out, backward = attend(self.mesh, q, k, v, is_causal)
        found = [self.gathered(x, positions) for x in (out, *backward(d_out)[:3])]
        errors = [float((mine - right).abs().max() / right.abs().max())
                  for mine, right in zip(found, expected(*whole, is_causal))]
        return max(errors) if all(map(math.isfinite, errors)) else math.inf

    def milliseconds(self, work):
        """-> (what `work` returned last, the repetitions' milliseconds by rank [repetition][rank], MiB that the rank sends
        in one which sends most)"""
        times = []
        for repetition in range(-2, self.flags.repetitions):  # the first ones warm up
            if self.device == "cuda":
                torch.empty(256 << 20, dtype=torch.int8, device="cuda").zero_()  # nothing of the inputs is in the L2 cache
                torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            with Sent(self.ranks) as sent:
                result = work()
            if self.device == "cuda":
                torch.cuda.synchronize()
            mine = 1e3 * (time.perf_counter() - start)
            by_rank = [None] * self.ranks
            dist.all_gather_object(by_rank, mine)
            if repetition >= 0:
                times.append(by_rank)
        return result, times, self.most(sent.bytes) / 2**20

    def most(self, mine):
        """The largest of the ranks' numbers."""
        by_rank = [None] * self.ranks
        dist.all_gather_object(by_rank, mine)
        return max(by_rank)

    def cells(self, tokens, mask, name, rotation):
        is_causal = mask == "causal"
        ring._cp_options.enable_load_balance = is_causal
        ring._cp_options.rotate_method = ROTATIONS[rotation]
        attend = BACKENDS[self.device][name]
        cells = [{"mask": mask, "choice": "all", "scheme": f"PyTorch {rotation} {name}", "direction": direction, "tokens": tokens,
                  "ranks": self.ranks} for direction in ("forward", "backward")]
        try:
            error = self.error(attend, is_causal)
            generator = torch.Generator(self.device).manual_seed(SEED + self.rank)
            q, k, v, d_out = self.inputs(tokens // self.ranks, generator)
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            (_, backward), *forward = self.milliseconds(lambda: attend(self.mesh, q, k, v, is_causal))
            _, *of_backward = self.milliseconds(lambda: backward(d_out))
            peak = self.most(torch.cuda.max_memory_allocated() / 2**20 if self.device == "cuda" else 0)
        except torch.OutOfMemoryError:
            return [{**cell, "note": "out of memory"} for cell in cells]
        except (RuntimeError, NotImplementedError, TypeError) as why:  # of a PyTorch or a GPU that cannot
            return [{**cell, "note": f"unsupported: {str(why).splitlines()[0]}"} for cell in cells]
        pairs = tokens * (tokens + 1) / 2 if is_causal else tokens**2
        mine = positions_of(self.rank, self.ranks, tokens, is_causal)
        imbalance = self.most(int((mine + 1).sum()) if is_causal else len(mine) * tokens) * self.ranks / pairs
        backend = f"PyTorch {torch.__version__}" + (f" and cuDNN {torch.backends.cudnn.version()}" if name == "cudnn" else "")
        for cell, (times, mib), flops in zip(cells, (forward, of_backward), (4, 10)):
            for what, of in (("max", max), ("mean", statistics.fmean)):
                values = sorted(of(by_rank) for by_rank in times)
                at = lambda share: values[round(share * (len(values) - 1))]
                cell.update({f"{what}_ms": at(0.5), f"{what}_p20_ms": at(0.2), f"{what}_p80_ms": at(0.8)})
            cell.update(plan_ms=0, with_plan_ms=cell["max_ms"], share=pairs / tokens**2, peak_mib=peak, error=error,
                        mib_moved=mib, mib_whole=mib, imbalance=imbalance, backend=backend,
                        gflops=flops * self.flags.head_dim * self.heads * pairs / cell["max_ms"] * 1e-6)
        return cells


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument("--tokens", type=int, nargs="+", default=[32768], help="of the sequence that ranks share")
    lengths.add_argument("--tokens-per-gpu", type=int, nargs="+", help="of the part that each rank has")
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    parser.add_argument("--csv", type=pathlib.Path, required=True, help="gets the cells, and a file .svg beside it")
    parser.add_argument("--beside", help="longca_gpu_rings.csv, to compare with")
    parser.add_argument("--device", choices=BACKENDS, default="cuda")
    parser.add_argument("--heads", type=int, nargs=2, default=[64, 8], metavar=("QUERY", "KEY"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--commit", default="unknown", help="that the table names")
    flags = parser.parse_args()
    bench = Bench(flags)
    cells, wrong = [], 0
    all_tokens = [bench.ranks * each for each in flags.tokens_per_gpu] if flags.tokens_per_gpu else flags.tokens
    for tokens in all_tokens:
        multiple = 2 * bench.ranks * (128 if flags.device == "cuda" else 64)  # as in ringleader-bench
        for mask in flags.masks:
            for name in BACKENDS[flags.device]:
                for rotation in ROTATIONS:
                    cells += bench.cells(-(-tokens // multiple) * multiple, mask, name, rotation)
                    for cell in cells[-2:]:
                        is_wrong = not cell.get("error", 0) < TOLERANCE[flags.device]
                        wrong += is_wrong
                        found = cell["note"] if "note" in cell else (
                            f"{cell['max_ms']:.2f} ms, {cell['gflops']:.1f} GFLOP/s, error {cell['error']:.1e}"
                            f"{': WRONG' if is_wrong else ''}")
                        if bench.rank == 0:
                            print(f"{cell['mask']}, {cell['scheme']}, {cell['direction']}, {cell['tokens']} tokens, "
                                  f"{cell['ranks']} ranks: {found}", flush=True)
    if bench.rank == 0:
        processor = torch.cuda.get_device_name() if flags.device == "cuda" else "CPU rank"
        facts = {"hardware": f"{bench.ranks} x {processor}", "commit": flags.commit,
                 "date": datetime.date.today().isoformat()}
        with open(flags.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows({**{k: f"{x:.4g}" if isinstance(x, float) else x for k, x in cell.items()}, **facts}
                             for cell in cells)
        picture(cells, flags.csv.with_suffix(".svg"))
        if flags.beside:
            print("\n".join(beside(cells, flags.beside)))
    try:
        dist.barrier()  # nobody leaves while another works
    except RuntimeError:
        pass  # another was through before this one, and has left
    return 1 if wrong else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Gloo's threads now and then end the process with SIGABRT where it takes itself down.
    os._exit(code)
