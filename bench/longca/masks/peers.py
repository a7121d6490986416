"""The kernels that main.py compares, and the back end that each of them really runs."""

import importlib.metadata
import importlib.util
import inspect
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from choices import TILE
from ringleader.kernels import sparse_attention, tiles_from_mask
from ringleader.kernels.masks import NAMES
from slices import are_apart, slices_of

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

KERNELS = ("ringleader", "cudnn", "flash", "flash_attn", "flash_attn_3", "magi_attention", "flex")
_OF_PYTORCH = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
# kernel -> the module that computes. The package has the kernel's name.
_MODULES = {"flash_attn": "flash_attn", "flash_attn_3": "flash_attn_interface", "magi_attention": "magi_attention"}
_PLAIN = ("full", "causal")  # masks that scaled_dot_product_attention knows
_OF_FLASH = (*_PLAIN, "full_window", "causal_window", "full_documents", "causal_documents")
_MASKS = {"cudnn": _PLAIN, "magi_attention": NAMES}


class Unsupported(Exception):
    """A kernel cannot do a cell; its text says what lacks where that is not the mask or the choice."""


def is_installed(kernel):
    return kernel not in _MODULES or importlib.util.find_spec(_MODULES[kernel]) is not None


def _version_of(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"


def backend_of(kernel, name, device):
    """For people: which library computes the mask."""
    if device == "cpu":
        return {"ringleader": "ringleader CPU engine", "flex": "PyTorch eager"}.get(kernel, "")
    if kernel == "ringleader":
        return "ringleader sm90"
    if kernel == "cudnn":
        return f"cuDNN {torch.backends.cudnn.version()}"
    if kernel == "flash":
        return f"FlashAttention of PyTorch {torch.__version__}{'' if name in _PLAIN else ', varlen_attn'}"
    if kernel in _MODULES:
        return f"{_MODULES[kernel]} {_version_of(kernel)}" if is_installed(kernel) else ""
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
    """Raises Unsupported where the kernel cannot do such a cell. cuDNN is that of scaled_dot_product_attention:
    varlen_attn of PyTorch 2.11 never takes it, and nested tensors go to it as an experiment alone, which is off."""
    if kernel in ("ringleader", "flex"):
        return
    if not is_installed(kernel):
        raise Unsupported(f"{kernel} is not installed")
    if name not in _MASKS.get(kernel, _OF_FLASH) or choice.kind != "all" or device == "cpu":
        raise Unsupported
    if kernel == "flash" and name not in _PLAIN and (
            varlen_attn is None or "window_size" not in inspect.signature(varlen_attn).parameters):
        raise Unsupported(f"varlen_attn of PyTorch {torch.__version__} has no windows")


def _pytorch(kernel, name):
    def attend(q, k, v):
        with sdpa_kernel(_OF_PYTORCH[kernel]):  # that one or none
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=name == "causal", enable_gqa=True)
    return attend, 0.0


def _varlen_of(kernel):
    """The kernel's function of q, k, v [tokens, heads, head_dim], where documents begin and the last one ends, the
    length of the longest, and _window_of."""
    if kernel == "flash":
        return lambda q, k, v, ends, longest, window: varlen_attn(
            q, k, v, ends, ends, longest, longest, window_size=window)
    attend = importlib.import_module(_MODULES[kernel]).flash_attn_varlen_func

    def of_package(q, k, v, ends, longest, window):
        made = attend(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest,
                      causal=window == (-1, 0), window_size=window)
        return made[0] if isinstance(made, tuple) else made  # early versions of flash_attn_3 return logarithms, too
    return of_package


def _window_of(name, p):
    """How many keys before and after a query's own it sees at most, -1 for all."""
    before = p.window - 1 if name.endswith("window") else -1
    return before, 0 if name.startswith("causal") else before


def _flash(kernel, name, p):
    def plan():
        starts = p.documents.starts[0] if "documents" in name else torch.zeros_like(p.documents.starts[0])
        firsts = torch.unique_consecutive(starts)
        ends = torch.cat([firsts, firsts.new_tensor([p.tokens])])
        return ends, (ends[1:] - ends[:-1]).max().item()

    (ends, longest), seconds = _timed(plan, p.device)
    varlen, window = _varlen_of(kernel), _window_of(name, p)

    def attend(q, k, v):
        return varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), ends, longest, window).transpose(0, 1)[None]
    return attend, seconds


def _magi_attention(name, p):
    """Flex-flash-attention, by as many of its documented shortcuts as the mask allows."""
    attend_slices = importlib.import_module("magi_attention.functional").flex_flash_attn_func

    def plan():
        queries, keys, types = slices_of(p.intervals(name).rows[0])
        return queries, keys, types, are_apart(queries[queries[:, 0].argsort()]), are_apart(keys)

    (queries, keys, types, are_queries_apart, are_keys_apart), seconds = _timed(plan, p.device)

    def attend(q, k, v):
        has_groups = q.shape[1] > k.shape[1]
        out, _ = attend_slices(*(x[0].transpose(0, 1) for x in (q, k, v)), queries, keys, types, cat_gqa=has_groups,
                               disable_fwd_atomic_reduction=are_queries_apart,
                               disable_bwd_dkv_atomic_reduction=are_keys_apart and has_groups)
        return out.transpose(0, 1)[None]
    return attend, seconds


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
    if kernel == "flex":
        return _flex(name, chosen, p)
    if kernel == "magi_attention":
        return _magi_attention(name, p)
    return _pytorch(kernel, name) if kernel in _OF_PYTORCH and name in _PLAIN else _flash(kernel, name, p)
