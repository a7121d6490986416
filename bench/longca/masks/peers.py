"""The kernels that main.py compares, and the back end that each of them really runs."""

import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from choices import TILE
from ringleader.kernels import sparse_attention, tiles_from_mask

KERNELS = ("ringleader", "cudnn", "flash", "flex")
_OF_PYTORCH = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


class Unsupported(Exception):
    """A kernel cannot do a cell."""


def backend_of(kernel, device):
    """For people: which library computes."""
    if device == "cpu":
        return {"ringleader": "ringleader CPU engine", "flex": "PyTorch eager"}.get(kernel, "")
    if kernel == "ringleader":
        return "ringleader sm90"
    if kernel == "cudnn":
        return f"cuDNN {torch.backends.cudnn.version()}"
    if kernel == "flash":
        return f"FlashAttention of PyTorch {torch.__version__}"
    import triton
    return f"Triton {triton.__version__}"


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def _timed(plan, device):
    """-> (what it makes, seconds), compiled beforehand."""
    plan()
    synchronize(device)
    start = time.perf_counter()
    made = plan()
    synchronize(device)
    return made, time.perf_counter() - start


def check_supported(kernel, name, choice, device):
    """Raises Unsupported where the kernel cannot do such a cell."""
    if kernel in _OF_PYTORCH and (name not in ("full", "causal") or choice.kind != "all" or device == "cpu"):
        raise Unsupported


def _pytorch(kernel, name):
    def attend(q, k, v):
        with sdpa_kernel(_OF_PYTORCH[kernel]):  # that one or none
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=name == "causal", enable_gqa=True)
    return attend, 0.0


def _ringleader(name, chosen, p):
    def plan():
        intervals = p.intervals(name)
        tiles = None
        if chosen is not None:
            tiles = tiles_from_mask(chosen[None], tokens=p.tokens, tile=TILE, causal=intervals.causal)
        return tiles, intervals

    (tiles, intervals), seconds = _timed(plan, p.device)
    return (lambda q, k, v: sparse_attention(q, k, v, tiles, mask=intervals)), seconds


def _flex(name, chosen, p):
    shown = p.mask_mod(name)
    visible = shown if chosen is None else (
        lambda b, h, i, j: shown(b, h, i, j) & chosen[h, i // TILE, j // TILE])

    def plan():
        return create_block_mask(visible, None, None if chosen is None else chosen.shape[0], p.tokens, p.tokens,
                                 device=p.device, _compile=p.device == "cuda")

    made, seconds = _timed(plan, p.device)
    if p.device == "cuda":
        # A mask is a recompilation; beyond a few of one function Dynamo would fall back to its slow way, without a word.
        torch._dynamo.reset()
        torch._dynamo.config.fail_on_recompile_limit_hit = True
    flex = torch.compile(flex_attention, dynamic=False) if p.device == "cuda" else flex_attention
    return (lambda q, k, v: flex(q, k, v, block_mask=made, enable_gqa=True)), seconds


def attention_of(kernel, name, chosen, p):
    """chosen: as Choice.draw returns it, of a cell that check_supported let pass. -> (a function of q, k, v, seconds that
    making the mask's data took)"""
    if kernel == "ringleader":
        return _ringleader(name, chosen, p)
    return _flex(name, chosen, p) if kernel == "flex" else _pytorch(kernel, name)
