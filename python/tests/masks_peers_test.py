"""What bench/longca/masks asks of FlashAttention and MagiAttention, by functions that do what their documentation says."""

import importlib.machinery
import pathlib
import sys
import types

import pytest
import torch
from oracle import CUDA

sys.path.append(str(pathlib.Path(__file__).parents[2] / "bench" / "longca" / "masks"))

import exact  # noqa: E402
import peers  # noqa: E402
from choices import Choice  # noqa: E402
from problem import Problem  # noqa: E402
from slices import are_apart, slices_of  # noqa: E402

from ringleader.kernels.masks import NAMES  # noqa: E402

pytestmark = pytest.mark.skipif(CUDA, reason="it looks at the arguments, on the CPU")

PLAIN = {"full", "causal"}
OF_FLASH = PLAIN | {"full_window", "causal_window", "full_documents", "causal_documents"}


def varlen(q, k, v, ends, longest, window):
    """q, k, v: [tokens, heads, head_dim]"""
    assert ends.dtype == torch.int32 and ends[-1] == len(q) and longest == (ends[1:] - ends[:-1]).max()
    before, after = window
    parts = []
    for document in zip(*(x.tensor_split(ends[1:-1].tolist()) for x in (q, k, v))):
        ahead = torch.arange(len(document[0])) - torch.arange(len(document[0]))[:, None]
        visible = ((before < 0) | (-ahead <= before)) & ((after < 0) | (ahead <= after))
        parts.append(torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in document), attn_mask=visible, enable_gqa=True).transpose(0, 1))
    return torch.cat(parts)


def of_pytorch(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
    assert cu_seq_q is cu_seq_k and max_q == max_k
    return varlen(query, key, value, cu_seq_q, max_q, window_size)


def of_package(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size):
    assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k and causal == (window_size == (-1, 0))
    return varlen(q, k, v, cu_seqlens_q, max_seqlen_q, window_size)


def visible_in(slices, tokens):
    """How many of the slices show each query each key, [tokens, tokens]."""
    shown = torch.zeros(tokens, tokens, dtype=torch.int64)
    for (first, last), (begin, end), kind in zip(*(x.tolist() for x in slices)):
        query, key = torch.arange(first, last)[:, None], torch.arange(begin, end)
        below = key - end <= query - last  # a causal slice is aligned to its lower right
        above = key - begin >= query - first  # an inverse causal one to its upper left
        shown[first:last, begin:end] += (below | (kind in (0, 2))) & (above | (kind in (0, 1)))
    return shown


def of_slices(q, k, v, q_ranges, k_ranges, attn_type_map, *, disable_fwd_atomic_reduction,
              disable_bwd_dkv_atomic_reduction, cat_gqa):
    assert cat_gqa and all(x.dtype == torch.int32 for x in (q_ranges, k_ranges, attn_type_map))
    for ranges, apart in ((q_ranges, disable_fwd_atomic_reduction), (k_ranges, disable_bwd_dkv_atomic_reduction)):
        slices_of_token = torch.zeros(len(q), dtype=torch.int64)
        for first, last in ranges.tolist():
            slices_of_token[first:last] += 1
        assert apart == bool(slices_of_token.max() <= 1)
    assert not disable_bwd_dkv_atomic_reduction or k_ranges.flatten().tolist() == sorted(k_ranges.flatten().tolist())
    shown = visible_in((q_ranges, k_ranges, attn_type_map), len(q))
    assert shown.max() <= 1, "a pair counts twice"
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=shown.bool(), enable_gqa=True)
    return out.transpose(0, 1), "what it says of the pass"


def package(name, function, called="flash_attn_varlen_func"):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    setattr(module, called, function)
    return module


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(peers, "varlen_attn", of_pytorch)
    monkeypatch.setitem(sys.modules, "flash_attn", package("flash_attn", of_package))
    monkeypatch.setitem(sys.modules, "flash_attn_interface",
                        package("flash_attn_interface", lambda *args, **more: (of_package(*args, **more), None)))
    functional = package("magi_attention.functional", of_slices, "flex_flash_attn_func")
    monkeypatch.setitem(sys.modules, "magi_attention.functional", functional)
    monkeypatch.setitem(sys.modules, "magi_attention", package("magi_attention", functional, "functional"))


def masks_of(kernel, choice=Choice(), device="cuda"):
    def is_supported(name):
        try:
            peers.check_supported(kernel, name, choice, device)
        except peers.Unsupported:
            return False
        return True
    return set(filter(is_supported, NAMES))


@pytest.mark.parametrize("kernel, name", [
    *((kernel, name) for kernel in ("flash_attn", "flash_attn_3") for name in sorted(OF_FLASH)),
    *(("magi_attention", name) for name in NAMES), *(("flash", name) for name in sorted(OF_FLASH - PLAIN))])
def test_masks(installed, kernel, name):
    p = Problem("cpu", 300, 4, 2, 64)
    attend, _ = peers.attention_of(kernel, name, None, p)
    out = attend(p.q, p.k, p.v)
    expected = exact.rows_of(p, name, None)
    results = (out.detach(), *torch.autograd.grad(out, (p.q, p.k, p.v), p.d_out))
    for rows, result in zip((*expected["forward"], *expected["backward"]), results, strict=True):
        assert rows.error(result) < 2e-2


@pytest.mark.parametrize("seed", range(20))
def test_slices_show_what_rows_do(seed):
    """Bounds that stay, go on by one or jump, queries that see nothing, intervals that meet."""
    draw = torch.Generator().manual_seed(seed)
    tokens = 40
    moves = torch.randint(-1, 3, (4, tokens), generator=draw) * (torch.rand(4, tokens, generator=draw) < 0.3)
    moves += (torch.arange(tokens) // 8 % 2)[None] * torch.randint(0, 2, (4, 1), generator=draw)
    bounds = moves.cumsum(1).add(torch.tensor([[2], [12], [12], [25]])).clamp(0, tokens)
    rows = bounds.cummax(0).values.T.contiguous().int()
    keys = torch.arange(tokens)
    begin, end, second_begin, second_end = (x[:, None] for x in rows.unbind(1))
    shown = visible_in(slices_of(rows), tokens)
    assert torch.equal(shown, (((begin <= keys) & (keys < end)) | ((second_begin <= keys) & (keys < second_end))).long())


def test_slices_of_plain_masks_are_one():
    p = Problem("cpu", 300, 4, 2, 64)
    for name, kind in (("full", 0), ("causal", 1)):
        queries, keys, types = slices_of(p.intervals(name).rows[0])
        assert (queries.tolist(), keys.tolist(), types.tolist()) == ([[0, 300]], [[0, 300]], [kind])
    assert len(slices_of(p.intervals("causal_documents").rows[0])[2]) == len(p.documents.starts[0].unique())
    assert len(slices_of(p.intervals("prefix_causal").rows[0])[2]) == 2


@pytest.mark.parametrize("ranges, apart", [
    ([[0, 4]], True), ([[0, 4], [4, 6]], True), ([[0, 4], [3, 6]], False), ([[4, 6], [0, 4]], False),
    ([[0, 9], [2, 3], [4, 6]], False), ([[0, 9], [9, 10], [5, 6]], False)])
def test_ranges_that_are_apart(ranges, apart):
    assert are_apart(torch.tensor(ranges)) == apart


def test_which_masks(installed):
    assert masks_of("ringleader") == masks_of("flex") == masks_of("magi_attention") == set(NAMES)
    assert masks_of("magi_attention", device="cpu") == masks_of("magi_attention", Choice("uniform", 0.5)) == set()
    assert masks_of("cudnn") == PLAIN
    for kernel in ("flash", "flash_attn", "flash_attn_3"):
        assert masks_of(kernel) == OF_FLASH
        assert masks_of(kernel, device="cpu") == masks_of(kernel, Choice("uniform", 0.5)) == set()


def test_pytorch_without_windows(monkeypatch):
    monkeypatch.setattr(peers, "varlen_attn", lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal: None)
    assert masks_of("flash") == PLAIN
    monkeypatch.setattr(peers, "varlen_attn", None)
    assert masks_of("flash") == PLAIN


def test_packages_that_are_not_there(monkeypatch):
    for module in ("flash_attn", "flash_attn_interface", "magi_attention"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "path", [])
    for kernel in ("flash_attn", "flash_attn_3", "magi_attention"):
        assert not peers.is_installed(kernel) and peers.backend_of(kernel, "full", "cuda") == ""
        with pytest.raises(peers.Unsupported, match=f"{kernel} is not installed"):
            peers.check_supported(kernel, "full", Choice(), "cuda")
    assert peers.is_installed("flash")


def test_back_ends(installed):
    assert peers.backend_of("flash", "full", "cuda") == f"FlashAttention of PyTorch {torch.__version__}"
    assert peers.backend_of("flash", "full_window", "cuda") == f"FlashAttention of PyTorch {torch.__version__}, varlen_attn"
    assert peers.backend_of("flash_attn_3", "full", "cuda") == "flash_attn_interface of an unknown version"


@pytest.mark.parametrize("name", sorted(OF_FLASH - PLAIN))
def test_varlen_attn_of_pytorch_takes_the_arguments(name):
    if masks_of("flash") == PLAIN:
        pytest.skip(f"PyTorch {torch.__version__} has no varlen_attn with windows")
    p = Problem("cpu", 300, 4, 2, 64)
    attend, _ = peers.attention_of("flash", name, None, p)
    inputs = [x.detach().to("meta").requires_grad_() for x in (p.q, p.k, p.v)]
    out = attend(*inputs)
    assert out.shape == p.q.shape
    gradients = torch.autograd.grad(out, inputs, torch.empty_like(out))
    assert [x.shape for x in gradients] == [x.shape for x in inputs]
