"""Masks that differ by head: FlexAttention's BlockMasks, and intervals of keys, forward and backward, against float64."""

import pytest
import torch
from oracle import (CUDA, DEVICE, TOLERANCE, attend, causal, check, error, inputs, pairs_of_diagonals, pairs_of_tiles,
                    random_tiles)
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask, flex_attention

from ringleader import kernels
from ringleader.kernels import sparse_attention, sparse_attention_varlen


def mask_mods(tokens):
    """name -> (mask_mod, groups of 4 heads whose masks are found to be alike)"""
    prefix = torch.tensor([[30, 90, 5, 0], [100, 1, 250, 64]], device=DEVICE)
    kept = random_tiles(2, 4, tokens, 128)

    def causal_mod(b, h, q, kv):
        return kv <= q

    return {
        "windows": (lambda b, h, q, kv: (q >= kv) & (q - kv < 20 * (h + 1)), 4),
        "joined": (and_masks(causal_mod, lambda b, h, q, kv: kv >= 5 * h), 4),
        "both ways": (lambda b, h, q, kv: (q - kv).abs() < 50 + h * 30, 4),
        "of pairs of heads": (lambda b, h, q, kv: (q >= kv) & (q - kv < 50 * (h // 2 + 1)), 2),
        "sinks": (lambda b, h, q, kv: (kv <= q) & ((q - kv < 30 + h) | (kv < 4 * h)), 4),
        "of sequences, too": (lambda b, h, q, kv: (kv <= q) | (kv < prefix[b, h]), 4),
        # All heads together show a query more than two runs.
        "apart": (lambda b, h, q, kv: (kv // 32) % 8 == 2 * h, 4),
        "of the first": (lambda b, h, q, kv: (kv <= q) & ((h > 0) | (q - kv < 3)), 4),
        "listed": (lambda b, h, q, kv: kept[b, h, q // 128, kv // 128] & ((q - kv).abs() < 100 + 50 * h), 4),
        "nothing in one": (lambda b, h, q, kv: (h != 2) & (q - kv < 40 * h), 4),
    }


@pytest.mark.parametrize("name", mask_mods(256))
@pytest.mark.parametrize("kv_heads, lists_by_head", [(1, True), (2, False), (4, True)])
def test_block_mask(name, kv_heads, lists_by_head):
    tokens = 256
    mask_mod, groups = mask_mods(tokens)[name]
    # Without sizes of its own it lists the blocks that the first sequence and head have.
    sizes = (2, 4) if lists_by_head or name == "listed" else (None, None)
    block_mask = create_block_mask(mask_mod, *sizes, tokens, tokens, device=DEVICE, BLOCK_SIZE=128 if lists_by_head else 256)
    pairs = create_mask(mask_mod, 2, 4, tokens, tokens, device=DEVICE)
    q, k, v = inputs(2, 4, kv_heads, tokens, 64)
    check(attend(block_mask), q, k, v, pairs)
    assert kernels.tiles_from_block_mask(block_mask, heads=4, batch=2).mask.rows.shape[1] == groups
    q, k, v = (x.detach() for x in (q, k, v))
    flex = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
    assert error(sparse_attention(q, k, v, block_mask), flex) < TOLERANCE


@pytest.mark.parametrize("tokens", [500, 1024])
def test_block_mask_of_partial_and_whole_blocks(tokens):
    """Windows end inside blocks, whole ones lie between, and parts of those that are evaluated at once end within a row."""
    def mask_mod(b, h, q, kv):
        return (q >= kv) & (q - kv < 200 * (h + 1))

    block_mask = create_block_mask(mask_mod, None, 8, tokens, tokens, device=DEVICE, BLOCK_SIZE=64)
    assert block_mask.full_kv_num_blocks.sum() > 0 and (tokens < 1024 or block_mask.kv_num_blocks.sum() > 128)
    check(attend(block_mask), *inputs(1, 8, 2, tokens, 128), create_mask(mask_mod, 1, 8, tokens, tokens, device=DEVICE))


def masks_by_hand(tokens, groups):
    visible = torch.stack([causal(tokens) & ~causal(tokens).tril(-30 * (g + 1)) for g in range(groups)])
    return kernels.intervals_of_mask(visible.unsqueeze(0)), visible


@pytest.mark.parametrize("groups, heads, kv_heads", [(1, 4, 2), (2, 4, 4), (2, 4, 2), (4, 4, 2), (3, 6, 2), (2, 6, 1)])
@pytest.mark.parametrize("with_tiles", [False, True])
def test_intervals_of_groups_of_heads(groups, heads, kv_heads, with_tiles):
    tokens = 300
    mask, visible = masks_by_hand(tokens, groups)
    pairs = visible.repeat_interleave(heads // groups, 0).unsqueeze(0)
    assert mask.causal and mask.rows.shape == (1, groups, tokens, 4)
    blocks = None
    if with_tiles:
        kept = random_tiles(2, heads, tokens, 64)
        kept[1, 1] = False
        blocks = kernels.tiles_from_mask(kept, tokens=tokens, tile=64)
        pairs = pairs & pairs_of_tiles(kept, tokens, 64)
    check(attend(blocks, mask=mask), *inputs(2, heads, kv_heads, tokens, 64), pairs)
    counts = torch.ones(3, dtype=torch.int32, device=DEVICE), torch.arange(3, device=DEVICE).view(3, 1)
    if not with_tiles:
        diagonal = pairs_of_tiles(torch.eye(3, dtype=torch.bool, device=DEVICE), tokens, 128)
        check(attend(counts, mask=mask), *inputs(2, heads, kv_heads, tokens, 64), pairs & diagonal)


def test_windows_and_diagonals_beside_intervals_of_groups():
    mask, visible = masks_by_hand(300, 2)
    pairs = visible.repeat_interleave(2, 0).unsqueeze(0)
    i = torch.arange(300, device=DEVICE)
    check(attend(kernels.SlidingWindow(25), mask=mask), *inputs(2, 4, 2, 300, 64), pairs & (i.unsqueeze(1) - i < 25))
    apart = torch.tensor([True, False, True, False, True], device=DEVICE).expand(2, 4, 5)
    check(attend(kernels.block_diagonals(apart, tile=64), mask=mask), *inputs(2, 4, 2, 300, 64),
          pairs & pairs_of_diagonals(apart, 300, 64))


def test_results_are_like_q():
    mask, _ = masks_by_hand(300, 4)
    q, k, v = inputs(2, 4, 2, 300, 64)
    out, lse = sparse_attention(q, k, v, mask=mask, return_lse=True, deterministic=True, scale=0.2)
    assert out.transpose(1, 2).is_contiguous() and out.shape == q.shape and lse.shape == q.shape[:3]
    assert torch.equal(sparse_attention(q, k, v, mask=mask, scale=0.2), out)


def test_packed_sequences():
    mask, visible = masks_by_hand(300, 2)
    cu_seqlens = torch.tensor([0, 37, 37, 200, 300], dtype=torch.int32, device=DEVICE)
    of_token = torch.bucketize(torch.arange(300, device=DEVICE), cu_seqlens[1:].long(), right=True)

    def packed(q, k, v):
        out, lse = sparse_attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), cu_seqlens, mask=mask, return_lse=True)
        return out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)

    pairs = visible.repeat_interleave(2, 0) & (of_token == of_token.unsqueeze(1))
    check(packed, *inputs(1, 4, 2, 300, 64), pairs.unsqueeze(0))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    torch._dynamo.reset()
    mask, _ = masks_by_hand(300, 4)
    blocks = kernels.tiles_from_mask(random_tiles(2, 4, 300, 64), tokens=300, tile=64)

    def attend_twice(q, k, v):
        return sparse_attention(q, k, v * 2, blocks, mask=mask, deterministic=True)

    q, k, v = inputs(2, 4, 2, 300, 64)
    compiled = torch.compile(attend_twice, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    expected, actual = attend_twice(q, k, v), compiled(q, k, v)
    assert error(actual, expected) < (1e-2 if CUDA else 1e-6)
    d_out = torch.randn_like(expected)
    for a, b in zip(torch.autograd.grad(actual, (q, k, v), d_out), torch.autograd.grad(expected, (q, k, v), d_out)):
        assert error(a, b) < (1e-2 if CUDA else 1e-6)


@pytest.mark.skipif(not CUDA, reason="the host waits for nothing on the CPU")
def test_no_wait():
    mask, _ = masks_by_hand(300, 4)
    blocks = kernels.tiles_from_mask(random_tiles(2, 4, 300, 64), tokens=300, tile=64)
    q, k, v = inputs(2, 4, 2, 300, 64)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for form in (None, blocks):
            out = sparse_attention(q, k, v, form, mask=mask)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_refused():
    q, k, v = inputs(1, 4, 2, 300, 64)
    mask, _ = masks_by_hand(300, 3)
    with pytest.raises(ValueError, match="q has 4 heads, k 2 and mask rows for 3; the first must be a multiple"):
        sparse_attention(q, k, v, mask=mask)
    mask, _ = masks_by_hand(200, 4)
    with pytest.raises(ValueError, match=r"int32 \[1, 300, 4\], or \[1, groups, 300, 4\]"):
        sparse_attention(q, k, v, mask=mask)
    mask, _ = masks_by_hand(300, 2)
    with pytest.raises(ValueError, match="documents beside a mask of intervals"):
        sparse_attention(q, k, v, mask=mask, documents=torch.zeros(1, 300, dtype=torch.int64, device=DEVICE))
    with pytest.raises(NotImplementedError, match="blocks is a Moba"):
        sparse_attention(q, k, v, kernels.Moba(block_size=64, tile=64), mask=mask)
