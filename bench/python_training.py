"""Trains a model of transformers at 131,072 tokens, with 5 % of the tiles and with SDPA: what both take, and their losses.
bench/python_kernels.py makes rows of it.

A model that knows nothing jumps in its first steps by more than what sparse attention could change, so the model is first
trained densely on shorter sequences. From there, with the same weights, optimizer's state and text, it goes on at the whole
length with each attention. Weights are float32 under autocast. SDPA goes on twice, with cuDNN and with FlashAttention, which
both are exact: what their losses differ by is what rounding does. So does a window of the last tokens as large as what is
chosen: what its loss differs by says how much of this text hangs on keys far back at all."""

import contextlib
import copy
import json
import pathlib
import random
import statistics
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringleader.kernels import SlidingWindow, VerticalSlash, huggingface

TOKENS, STEPS, LAYERS = 131072, 5, 4
FIRST_TOKENS, FIRST_STEPS = 32768, 100  # of the dense training before
LEARNING_RATE, FIRST_LEARNING_RATE = 1e-4, 6e-4
SHARE = 0.05  # of the causal pairs; a window of half of it times the tokens has as many
WINDOW = "ringleader_window"


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def text_of_machine(tokens):
    """Bytes of Python's own sources: text of which every machine with PyTorch has enough."""
    data = bytearray()
    for file in sorted(pathlib.Path(torch.__file__).parent.rglob("*.py")):
        data += file.read_bytes()
        if len(data) >= tokens:
            return torch.frombuffer(data[:tokens], dtype=torch.uint8).long()
    raise SystemExit(f"python_kernels: PyTorch's sources have {len(data)} bytes; {tokens} are needed")


class Counted:
    """A choice that remembers, on the device, how much was visited."""

    def __init__(self, choice):
        self.choice, self.shares = choice, []

    def __call__(self, q, k, **arguments):
        blocks = self.choice(q, k, **arguments)
        tiles = -(-q.shape[2] // blocks.tile)
        causal = q.shape[0] * q.shape[1] * tiles * (tiles + 1) / 2
        # A column counts as if it crossed all rows of tiles: of what diagonals leave, it is that much at most.
        columns = blocks.columns.counts.sum() / blocks.tile * tiles
        self.shares.append(((blocks.visited.sum() + columns) / causal).detach())
        return blocks


class Trained:
    """A model and its optimizer, which can go back to where they were."""

    def __init__(self, config, device):
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        self.device = device
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        self.model = self.model.to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), fused=device == "cuda")

    def state(self):
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def go_back(self, state):
        model, optimizer = copy.deepcopy(state)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def train(self, batches, rates, backends=contextlib.nullcontext):
        """-> (losses, seconds a step: median without the first)"""
        losses, seconds = [], []
        for batch, rate in zip(batches, rates):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            synchronize(self.device)
            start = time.perf_counter()
            with backends():  # backward computes layers again
                with torch.autocast(self.device, torch.bfloat16):
                    loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
                loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
        return losses, statistics.median(seconds[1:])


def config_of(layers, tokens, small):
    from transformers import Qwen2Config

    shape = json.loads((pathlib.Path(__file__).parent / "models" / "qwen2.5-3b.json").read_text())
    shape.update(num_hidden_layers=layers, vocab_size=256, max_position_embeddings=tokens)
    if small:
        shape.update(hidden_size=256, intermediate_size=512, num_attention_heads=2, num_key_value_heads=1)
    for name in ("architectures", "torch_dtype", "model_type", "bos_token_id", "eos_token_id"):
        shape.pop(name, None)
    return Qwen2Config(**shape)


def exactly(backend, device):
    """SDPA with that back end: by itself it may take a slower one."""
    return contextlib.nullcontext if device == "cpu" else lambda: sdpa_kernel(backend)


def training(device):
    """-> what each attention took and came to"""
    small = device == "cpu"
    tokens, steps, layers = (1024, 3, 2) if small else (TOKENS, STEPS, LAYERS)
    first_tokens, first_steps = (256, 4) if small else (FIRST_TOKENS, FIRST_STEPS)
    first = first_steps * first_tokens
    text = text_of_machine(first + tokens * steps).to(device)
    first_batches = list(text[:first].view(first_steps, 1, first_tokens))
    random.Random(0).shuffle(first_batches)
    batches, rates = text[first:].view(steps, 1, tokens), [LEARNING_RATE] * steps

    trained = Trained(config_of(layers, tokens, small), device)
    warm_up = max(first_steps // 10, 1)
    first_losses, _ = trained.train(
        first_batches, [FIRST_LEARNING_RATE * min(1.0, (step + 1) / warm_up) for step in range(first_steps)],
        exactly(SDPBackend.CUDNN_ATTENTION, device))
    trained.model.gradient_checkpointing_enable()
    state = trained.state()
    choice = Counted(VerticalSlash(density=SHARE, column_mass=1.0, diagonal_mass=1.0, estimate_at="spread"))
    huggingface.register(choice)
    huggingface.register(SlidingWindow(max(int(tokens * SHARE / 2), 1)), name=WINDOW)
    result = {
        "tokens": tokens, "layers": layers,
        "before": f"{first_steps} dense steps of {first_tokens} tokens, loss {first_losses[0]:.4f} to "
                  f"{statistics.mean(first_losses[-5:]):.4f}",
    }
    for name, implementation, backend in (("sparse", huggingface.NAME, None), ("window", WINDOW, None),
                                          ("sdpa", "sdpa", SDPBackend.CUDNN_ATTENTION),
                                          ("flash", "sdpa", SDPBackend.FLASH_ATTENTION)):
        trained.go_back(state)
        trained.model.set_attn_implementation(implementation)
        losses, seconds = trained.train(batches, rates, exactly(backend, device) if backend else contextlib.nullcontext)
        result[f"{name}_tokens_per_second"] = round(tokens / seconds)
        result[f"{name}_losses"] = [round(x, 4) for x in losses]
    result["visited"] = round(torch.stack(choice.shares).mean().item(), 4)
    return result
