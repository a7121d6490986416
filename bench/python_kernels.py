#!/usr/bin/env python3
"""Measures ringleader.kernels on one GPU and writes a row each to bench/results/figures/masks_schemes.json: what the
PyTorch function takes more than the same call from C++, and training a Hugging Face model at 128K tokens and 5 % of the
tiles beside SDPA. bench/python_kernels.sh says how it is started; `--device cpu` runs it on the CPU's operators, in small
shapes and without writing rows, to see that it runs."""

import argparse
import contextlib
import datetime
import json
import pathlib
import statistics
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringleader.kernels import VerticalSlash, block_diagonals, huggingface, sparse_attention
from ringleader.kernels.blocks import Diagonals

COMMAND = "bench/python_kernels.sh build/wheels"


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def extra_microseconds(device, backward):
    """-> (extra, from Python, from C++): medians of a call's microseconds on the host, which the GPU does not hold up:
    shapes are small, and it is waited for before its queue is full."""
    q, k, v = (torch.randn(1, 256, heads, 64, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
               for heads in (2, 1, 1))
    blocks = block_diagonals(torch.ones(1, 2, 2, dtype=torch.bool, device=device))
    pattern, lists, tile, size = blocks.visit()
    calls, d_out = 20, torch.ones_like(q)

    def from_python():
        start = time.perf_counter()
        for _ in range(calls):
            out = sparse_attention(q, k, v, blocks)
            if backward:
                torch.autograd.grad(out, (q, k, v), d_out)
        return time.perf_counter() - start

    def from_cpp():
        return torch.ops.ringleader_bench.call_seconds(q, k, v, pattern, lists, tile, size, 64**-0.5, calls, backward)

    seconds = {from_python: [], from_cpp: []}
    for repeat in range(110):  # in turn, so that clocks and caches are alike
        for call, times in seconds.items():
            synchronize(device)
            spent = call()
            if repeat >= 10:
                times.append(spent / calls * 1e6)
    synchronize(device)
    python, cpp = (statistics.median(times) for times in seconds.values())
    return python - cpp, python, cpp


def text_of_machine(tokens):
    """Bytes of Python's own sources: text of which every machine with PyTorch has enough."""
    data = bytearray()
    for file in sorted(pathlib.Path(torch.__file__).parent.rglob("*.py")):
        data += file.read_bytes()
        if len(data) >= tokens:
            return torch.frombuffer(data[:tokens], dtype=torch.uint8).long()
    raise SystemExit(f"python_kernels: PyTorch's sources have {len(data)} bytes; {tokens} are needed")


def sdpa_backends(device):
    """On GPUs the fastest that there is: SDPA by itself may take a slower one."""
    if device == "cpu":
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)


def train(implementation, config, batches, device):
    """-> (losses, seconds a step: median without the first)"""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.bfloat16)
    model = model.to(device).train()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=device == "cuda")
    losses, seconds = [], []
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = 3e-4 * min(1.0, (step + 1) / 4)
        synchronize(device)
        start = time.perf_counter()
        with sdpa_backends(device):  # backward computes layers again
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return losses, statistics.median(seconds[1:])


class Counted:
    """A choice that remembers, on the device, how much was visited."""

    def __init__(self, choice):
        self.choice, self.shares = choice, []

    def __call__(self, q, k, **arguments):
        blocks: Diagonals = self.choice(q, k, **arguments)
        tiles = -(-q.shape[2] // blocks.tile)
        causal = q.shape[0] * q.shape[1] * tiles * (tiles + 1) / 2
        # A column is as much as the tiles that it crosses, beyond what diagonals cover.
        columns = blocks.columns.counts.sum() / blocks.tile * tiles
        self.shares.append(((blocks.visited.sum() + columns) / causal).detach())
        return blocks


def training(device):
    """-> what both took and came to"""
    from transformers import Qwen2Config

    small = device == "cpu"
    tokens, steps, layers = (1024, 3, 2) if small else (131072, 8, 4)
    shape = json.loads((pathlib.Path(__file__).parent / "models" / "qwen2.5-3b.json").read_text())
    shape.update(num_hidden_layers=layers, vocab_size=256, max_position_embeddings=tokens)
    if small:
        shape.update(hidden_size=256, intermediate_size=512, num_attention_heads=2, num_key_value_heads=1)
    for name in ("architectures", "torch_dtype", "model_type", "bos_token_id", "eos_token_id"):
        shape.pop(name, None)
    config = Qwen2Config(**shape)
    data = text_of_machine(tokens * steps).view(steps, 1, tokens).to(device)
    choice = Counted(VerticalSlash(density=0.05, column_mass=1.0, diagonal_mass=1.0, estimate_at="spread"))
    huggingface.register(choice)
    sparse_losses, sparse = train(huggingface.NAME, config, data, device)
    if device == "cuda":
        torch.cuda.empty_cache()
    dense_losses, dense = train("sdpa", config, data, device)
    return {
        "tokens": tokens,
        "layers": layers,
        "visited": round(torch.stack(choice.shares).mean().item(), 4),
        "sparse_tokens_per_second": round(tokens / sparse),
        "sdpa_tokens_per_second": round(tokens / dense),
        "sparse_losses": [round(x, 4) for x in sparse_losses],
        "sdpa_losses": [round(x, 4) for x in dense_losses],
    }


def rows_of(device, commit):
    common = {"hardware": torch.cuda.get_device_name() if device == "cuda" else "cpu",
              "commit": commit, "date": datetime.date.today().isoformat(),
              "command": COMMAND}
    rows = []
    for name, backward in (("forward", False), ("forward and backward", True)):
        extra, python, cpp = extra_microseconds(device, backward)
        rows.append({"row": f"PyTorch function, {name}: microseconds more than the same call from C++",
                     "value": round(extra, 1), "asked": "<= 15", "met": extra <= 15, "peer": "the operator called from C++",
                     "from_python": round(python, 1), "from_cpp": round(cpp, 1), **common})
        print(json.dumps(rows[-1]), flush=True)
    result = training(device)
    speedup = result["sparse_tokens_per_second"] / result["sdpa_tokens_per_second"]
    last = len(result["sdpa_losses"]) // 2
    loss, peer = (statistics.mean(result[key][last:]) for key in ("sparse_losses", "sdpa_losses"))
    what = "training a Hugging Face model (Qwen2.5-3B shape, 4 layers, bytes) at 131,072 tokens and 5 % on one GPU"
    rows.append({"row": f"{what}: tokens a second of SDPA's", "value": round(speedup, 2), "asked": ">= 3",
                 "met": speedup >= 3, "peer": "SDPA (cuDNN, else FlashAttention), the same model", **result, **common})
    rows.append({"row": f"{what}: loss against SDPA's, mean of the later half of the steps",
                 "value": round(loss / peer - 1, 5), "asked": "within 0.0025", "met": abs(loss / peer - 1) <= 0.0025,
                 "peer": "SDPA (cuDNN, else FlashAttention), the same model", **common})
    for row in rows[-2:]:
        print(json.dumps(row), flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--call-from-cpp", required=True, help="call_from_cpp.so, from deploy/python_kernels.sh --bench")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--output", type=pathlib.Path, help="the file of rows, which other rows stay in")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    torch.ops.load_library(options.call_from_cpp)
    rows = rows_of(options.device, options.commit)
    if options.device == "cpu" or options.output is None:
        return
    new = {row["row"] for row in rows}
    kept = json.loads(options.output.read_text()) if options.output.exists() else []
    rows = [row for row in kept if row["row"] not in new] + rows
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
