"""What bench/longca/masks asks of FlashAttention, by functions that do what its documentation says."""

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


def package(name, function):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.flash_attn_varlen_func = function
    return module


@pytest.fixture
def flash(monkeypatch):
    monkeypatch.setattr(peers, "varlen_attn", of_pytorch)
    monkeypatch.setitem(sys.modules, "flash_attn", package("flash_attn", of_package))
    monkeypatch.setitem(sys.modules, "flash_attn_interface",
                        package("flash_attn_interface", lambda *args, **more: (of_package(*args, **more), None)))


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
    *(("flash", name) for name in sorted(OF_FLASH - PLAIN))])
def test_masks(flash, kernel, name):
    p = Problem("cpu", 300, 4, 2, 64)
    attend, _ = peers.attention_of(kernel, name, None, p)
    out = attend(p.q, p.k, p.v)
    expected = exact.rows_of(p, name, None)
    results = (out.detach(), *torch.autograd.grad(out, (p.q, p.k, p.v), p.d_out))
    for rows, result in zip((*expected["forward"], *expected["backward"]), results, strict=True):
        assert rows.error(result) < 2e-2


def test_which_masks(flash):
    assert masks_of("ringleader") == masks_of("flex") == set(NAMES)
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
    for module in ("flash_attn", "flash_attn_interface"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "path", [])
    for kernel in ("flash_attn", "flash_attn_3"):
        assert not peers.is_installed(kernel) and peers.backend_of(kernel, "full", "cuda") == ""
        with pytest.raises(peers.Unsupported, match=f"{kernel} is not installed"):
            peers.check_supported(kernel, "full", Choice(), "cuda")
    assert peers.is_installed("flash")


def test_back_ends(flash):
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
