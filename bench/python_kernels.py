#!/usr/bin/env python3
"""Measures ringleader.kernels on one GPU and writes rows to bench/results/figures/masks_schemes.json: what the PyTorch
function takes more than the same call from C++, MoBA with gathered queries beside whole tiles, and training a Hugging Face model at 128K tokens and 5 % of the tiles beside
SDPA (bench/python_training.py). bench/python_kernels.sh says how it is started; `--device cpu` runs it on the CPU's
operators, in small shapes and without writing rows, to see that it runs."""

import argparse
import datetime
import json
import pathlib
import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

from figure_rows import write_rows
from python_training import synchronize, training
from ringleader.kernels import Moba, block_diagonals, sparse_attention

COMMAND = "bench/python_kernels.sh build/wheels"
CALLS = 20  # in the clock at once


def in_turn(device, *measured):
    """Medians over runs of functions that return seconds for CALLS calls, in microseconds a call. They run in turn, so that
    clocks and caches are alike, and the device is waited for in between, before its queue is full."""
    times = [[] for _ in measured]
    for repeat in range(110):
        for run, of_run in zip(measured, times):
            synchronize(device)
            seconds = run()
            if repeat >= 10:
                of_run.append(seconds / CALLS * 1e6)
    synchronize(device)
    return [statistics.median(of_run) for of_run in times]


def call_microseconds(device, layers, backward):
    """-> (from Python, from C++, SDPA's from Python, SDPA's from C++): a call's microseconds on the host, which the GPU does
    not hold up: shapes are small. Each call's input is the output of the one before it, `layers` times, and then one backward
    goes through these."""
    q, k, v = (torch.randn(1, 256, heads, 64, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
               for heads in (2, 1, 1))
    blocks = block_diagonals(torch.ones(1, 2, 2, dtype=torch.bool, device=device))
    pattern, lists, _ = blocks.visit()
    d_out = torch.ones_like(q)

    def from_python(attention):
        def run():
            start = time.perf_counter()
            for _ in range(CALLS // layers):
                x = q
                for _ in range(layers):
                    x = attention(x)
                if backward:
                    torch.autograd.grad(x, (q, k, v), d_out)
            del x
            return time.perf_counter() - start
        return run

    bench, chains = torch.ops.ringleader_bench, (CALLS // layers, layers, backward)
    return in_turn(device,
                   from_python(lambda x: sparse_attention(x, k, v, blocks)),
                   lambda: bench.call_seconds(q, k, v, pattern, lists, *chains),
                   from_python(lambda x: scaled_dot_product_attention(x, k, v, is_causal=True, enable_gqa=True)),
                   lambda: bench.sdpa_seconds(q, k, v, *chains))


def backward_microseconds(device):
    """-> (from Python, from C++): torch.autograd.grad of one multiplication, which has nothing of ringleader's."""
    x = torch.ones(16, device=device, requires_grad=True)
    out, d_out = x * 2, torch.ones(16, device=device)

    def from_python():
        start = time.perf_counter()
        for _ in range(CALLS):
            torch.autograd.grad(out, x, d_out, retain_graph=True)
        return time.perf_counter() - start

    return in_turn(device, from_python, lambda: torch.ops.ringleader_bench.grad_seconds(out, x, CALLS))


def rows_of_calls(device, common):
    rows = []
    chain = f"a call's share of {CALLS} in a chain, as a model's layers are, and one backward through them"
    for name, layers, backward in (("forward", 1, False), ("forward and backward", 1, True), (chain, CALLS, True)):
        python, cpp, sdpa_python, sdpa_cpp = call_microseconds(device, layers, backward)
        rows.append({"row": f"PyTorch function, {name}: microseconds more than the same from C++",
                     "value": round(python - cpp, 1), "asked": "<= 15", "met": python - cpp <= 15,
                     "peer": "the operator called from C++", "from_python": round(python, 1), "from_cpp": round(cpp, 1),
                     "more_that_scaled_dot_product_attention_takes": round(sdpa_python - sdpa_cpp, 1), **common})
    python, cpp = backward_microseconds(device)
    rows[1]["more_that_torch_autograd_grad_of_one_multiplication_takes"] = round(python - cpp, 1)
    return rows


def rows_of_moba(device, common):
    """MoBA whose queries are gathered by block beside the same choice with tiles visited whole."""
    tokens, block, topk = (131072, 1024, 8) if device == "cuda" else (1024, 128, 2)
    q, k, v = (torch.randn(1, tokens, heads, 128, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
               for heads in (16, 2, 2))
    choice, d_out = Moba(block_size=block, topk_blocks=topk)(q, k), torch.randn_like(q)

    def milliseconds(blocks, backward):
        seconds = []
        for _ in range(6):
            synchronize(device)
            start = time.perf_counter()
            out = sparse_attention(q, k, v, blocks)
            if backward:
                torch.autograd.grad(out, (q, k, v), d_out)
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[1:]) * 1e3

    for name, backward in (("forward", False), ("forward and backward", True)):
        rows, whole = milliseconds(choice, backward), milliseconds(choice._replace(topk_blocks=0), backward)
        yield {"row": f"MoBA, {topk} of {tokens // block} blocks, {tokens} tokens, 16 heads, 2 KV heads, {name}: speed of whole tiles'",
               "value": round(whole / rows, 2), "asked": "reported", "met": True, "peer": "tiles visited whole",
               "milliseconds": round(rows, 2), "of_whole_tiles": round(whole, 2), **common}


def rows_of_training(device, common):
    result = training(device)
    speedup = result["sparse_tokens_per_second"] / result["sdpa_tokens_per_second"]
    last = len(result["sdpa_losses"]) // 2
    loss, peer, again, window = (statistics.mean(result[f"{key}_losses"][last:])
                                 for key in ("sparse", "sdpa", "flash", "window"))
    what = "training a Hugging Face model (Qwen2.5-3B shape, 4 layers, bytes) at 131,072 tokens and 5 % on one GPU"
    return [
        {"row": f"{what}: tokens a second of SDPA's", "value": round(speedup, 2), "asked": ">= 3", "met": speedup >= 3,
         "peer": "SDPA (cuDNN), the same model", **result, **common},
        {"row": f"{what}, after dense training on shorter sequences: loss against SDPA's, mean of the later half of the steps",
         "value": round(loss / peer - 1, 5),
         "asked": "within 0.0025", "met": abs(loss / peer - 1) <= 0.0025,
         "peer": "SDPA (cuDNN), the same model, weights and text", "before": result["before"],
         "of_flash_attention_against_cudnn": round(again / peer - 1, 5),
         "of_a_window_as_large_against_cudnn": round(window / peer - 1, 5), **common}]


def rows_of(device, commit):
    common = {"hardware": torch.cuda.get_device_name() if device == "cuda" else "cpu",
              "commit": commit, "date": datetime.date.today().isoformat(), "command": COMMAND}
    for part in (rows_of_calls, rows_of_moba, rows_of_training):
        for row in part(device, common):
            print(json.dumps(row), flush=True)
            yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--call-from-cpp", required=True, help="call_from_cpp.so, from deploy/python_kernels.sh --bench")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=pathlib.Path, help="the file of rows, which other rows stay in")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    torch.ops.load_library(options.call_from_cpp)
    is_kept, rows = options.device == "cuda" and options.output is not None, []
    for row in rows_of(options.device, options.commit):
        rows.append(row)
        if is_kept:
            write_rows([row], options.output)  # at once: what follows may be cut off
    if is_kept:
        write_rows(rows, options.output, all_of=COMMAND)


if __name__ == "__main__":
    main()
