"""Attention in float64 from masks of pairs, and what the tests share. RINGLEADER_TEST_DEVICE: cpu (default) or cuda."""

import os

import torch

from ringleader.kernels import sparse_attention

DEVICE = os.environ.get("RINGLEADER_TEST_DEVICE", "cpu")
CUDA = DEVICE == "cuda"
DTYPE = torch.bfloat16 if CUDA else torch.float32
# A share of the norm: kernels in bf16 round q, k, v, P and dS.
TOLERANCE = 2e-2 if CUDA else 2e-5


def inputs(batch, heads, kv_heads, tokens, head_dim, seed=0, dtype=DTYPE):
    """q, k, v as models hand them over: [batch, heads, tokens, head_dim] views of [batch, tokens, heads, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, tokens, h, head_dim, generator=generator).to(DEVICE, dtype).transpose(1, 2).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]


def causal(tokens):
    return torch.ones(tokens, tokens, dtype=torch.bool, device=DEVICE).tril()


def pairs_of_tiles(tiles, tokens, tile):
    """[..., tiles, tiles] -> [..., tokens, tokens], without the causal mask."""
    return tiles.repeat_interleave(tile, -1).repeat_interleave(tile, -2)[..., :tokens, :tokens]


def pairs_of_diagonals(kept, tokens, tile):
    """kept: [..., blocks], whether a block sees the one so many before it -> [..., tokens, tokens], without the causal mask."""
    blocks = torch.arange(kept.shape[-1], device=kept.device)
    apart = blocks.unsqueeze(1) - blocks
    return pairs_of_tiles(kept[..., apart.clamp(min=0)] & (apart >= 0), tokens, tile)


def same_document(ids):
    """[batch, 1, tokens, tokens]; ids: [batch, tokens]"""
    return (ids.unsqueeze(1) == ids.unsqueeze(2)).unsqueeze(1)


def oracle(q, k, v, pairs, scale=None):
    """out, lse in float64, differentiable; pairs: broadcasts to [batch, heads, tokens, tokens]"""
    group = q.shape[1] // k.shape[1]
    logits = q @ k.repeat_interleave(group, 1).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    pairs = pairs.expand(logits.shape)
    sees = pairs.any(-1, keepdim=True)
    logits = logits.masked_fill(~pairs, -torch.inf)
    weights = torch.where(sees, torch.softmax(logits.masked_fill(~sees, 0), -1), 0)
    lse = torch.where(sees[..., 0], logits.masked_fill(~sees, 0).logsumexp(-1), -torch.inf)
    return weights @ v.repeat_interleave(group, 1), lse


def error(actual, expected):
    """Of the norm; both zero: zero."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-12)).item()


def check(attend, q, k, v, pairs, tolerance=TOLERANCE):
    """attend(q, k, v) -> out, lse agrees with the oracle, and so do the gradients of both."""
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = attend(q, k, v)
    wanted, wanted_lse = oracle(*exact, pairs)
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    assert error(out, wanted) < tolerance
    seen = wanted_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen) and (lse[~seen] == -torch.inf).all()
    assert error(lse[seen], wanted_lse[seen]) < tolerance
    generator = torch.Generator().manual_seed(7)
    d_out = torch.randn(out.shape, generator=generator).to(out)
    d_lse = torch.randn(lse.shape, generator=generator).to(lse)
    gradients = torch.autograd.grad((out, lse), (q, k, v), (d_out, d_lse))
    # A row that sees nothing has no gradient.
    wanted_gradients = torch.autograd.grad((wanted, wanted_lse), exact,
                                           (d_out.double(), d_lse.double().masked_fill(~seen, 0)))
    for name, actual, expected in zip("qkv", gradients, wanted_gradients):
        assert error(actual, expected) < tolerance, f"d{name}"


def attend(blocks=None, **arguments):
    return lambda q, k, v: sparse_attention(q, k, v, blocks, return_lse=True, **arguments)


def random_tiles(batch, heads, tokens, tile, density=0.4, seed=3):
    tiles = -(-tokens // tile)
    kept = torch.rand(batch, heads, tiles, tiles, generator=torch.Generator().manual_seed(seed)) < density
    return kept.to(DEVICE)


def document_ids(batch, tokens):
    """Documents of different lengths, whose ends lie inside tiles and on their edges."""
    ids = torch.zeros(batch, tokens, dtype=torch.int64, device=DEVICE)
    for b in range(batch):
        for first in (37, 64, 65, 200 + b, 256):
            ids[b, first:] += 1
    return ids
