"""sparse_attention, forward and backward, against float64, for everything that it takes as blocks."""

import pytest
import torch
from oracle import (DEVICE, TOLERANCE, attend, causal, check, document_ids, error, inputs, oracle, pairs_of_tiles, random_tiles,
                    same_document)
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask, flex_attention

from ringleader import kernels
from ringleader.kernels import block_mask as block_mask_module
from ringleader.kernels import sparse_attention


@pytest.mark.parametrize("tokens", [1, 63, 128, 300])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(4, 2, 64), (3, 1, 128)])
def test_dense(tokens, heads, kv_heads, head_dim):
    check(attend(), *inputs(2, heads, kv_heads, tokens, head_dim), causal(tokens))


@pytest.mark.parametrize("window", [1, 64, 100])
def test_window(window):
    pairs = causal(300) & ~causal(300).tril(-window)
    check(attend(kernels.SlidingWindow(window)), *inputs(2, 4, 2, 300, 64), pairs)


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("tokens", [300, 512])
@pytest.mark.parametrize("documents", [False, True])
def test_tiles(tile, tokens, documents):
    kept = random_tiles(2, 4, tokens, tile)
    kept[0, 1] = False  # a head that sees nothing
    kept[1, 2, 1] = False  # and a row
    blocks = kernels.tiles_from_mask(kept, tokens=tokens, tile=tile)
    pairs = pairs_of_tiles(kept, tokens, tile) & causal(tokens)
    ids = document_ids(2, tokens) if documents else None
    if documents:
        pairs = pairs & same_document(ids)
    check(attend(blocks, documents=ids), *inputs(2, 4, 2, tokens, 64), pairs)


def test_dense_documents():
    ids = document_ids(2, 300)
    check(attend(documents=ids), *inputs(2, 4, 2, 300, 128), causal(300) & same_document(ids))


def test_lists():
    tokens, kept = 300, random_tiles(2, 1, 300, 128)
    counts = kept.sum(-1)
    indices = kept.int().argsort(-1, descending=True)
    pairs = pairs_of_tiles(kept, tokens, 128) & causal(tokens)
    check(attend((counts.int(), indices.int())), *inputs(2, 4, 2, tokens, 64), pairs)
    shared = attend((counts[0, 0], indices[0, 0]))  # of all sequences and heads
    check(shared, *inputs(2, 4, 2, tokens, 64), pairs[:1])


@pytest.mark.parametrize("block_size", [(128, 64), (64, 192), (256, 128)])
def test_lists_of_other_blocks(block_size):
    tokens = 500
    rows, blocks = -(-tokens // block_size[0]), -(-tokens // block_size[1])
    kept = torch.rand(1, 4, rows, blocks, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.5
    full = torch.rand(1, 4, rows, blocks, generator=torch.Generator().manual_seed(2)).to(DEVICE) < 0.2
    lists = kernels.tiles_from_lists(
        kept.sum(-1), kept.int().argsort(-1, descending=True), tokens=tokens, heads=4, block_size=block_size,
        full_counts=full.sum(-1), full_indices=full.int().argsort(-1, descending=True))
    pairs = (kept | full).repeat_interleave(block_size[0], 2).repeat_interleave(block_size[1], 3)
    check(attend(lists), *inputs(1, 4, 4, tokens, 64), pairs[..., :tokens, :tokens] & causal(tokens))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("with_columns", [False, True])
def test_diagonals(with_columns, documents):
    tokens, tile = 300, 64
    kept = torch.rand(2, 4, 5, generator=torch.Generator().manual_seed(5)).to(DEVICE) < 0.3
    row = torch.arange(5, device=DEVICE)
    delta = row.unsqueeze(1) - row
    tiles = (kept[..., delta.clamp(min=0)] | (delta == 0)) & (delta >= 0)
    pairs = pairs_of_tiles(tiles, tokens, tile)
    columns = None
    if with_columns:
        positions = torch.tensor([7, 290, 64, 130, 2]).to(DEVICE).expand(2, 4, 5)
        counts = torch.tensor([[5, 3, 0, 1], [2, 5, 4, 4]]).to(DEVICE)
        columns = kernels.selected_columns(positions, counts, tokens=tokens)
        for b, h in torch.cartesian_prod(torch.arange(2), torch.arange(4)).tolist():
            pairs[b, h, :, positions[b, h, : counts[b, h]]] = True
    pairs = pairs & causal(tokens)
    ids = document_ids(2, tokens) if documents else None
    if documents:
        pairs = pairs & same_document(ids)
    check(attend(kernels.block_diagonals(kept, tile=tile), columns=columns, documents=ids),
          *inputs(2, 4, 2, tokens, 64), pairs)


def test_strides_scale_and_bfloat16():
    q, k, v = inputs(2, 4, 2, 200, 64, dtype=torch.bfloat16)
    check(attend(), q, k, v, causal(200), tolerance=2e-2)
    dense = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    assert torch.equal(sparse_attention(*dense), sparse_attention(q, k, v))
    packed = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], -1).detach()
    parts = [x.unflatten(-1, (-1, 64)).transpose(1, 2) for x in packed.split([256, 128, 128], -1)]
    assert torch.equal(sparse_attention(*parts), sparse_attention(q, k, v))
    halved, _ = oracle(*(x.detach().double() for x in (q, k, v)), causal(200), scale=0.05)
    assert error(sparse_attention(q, k, v, scale=0.05), halved) < 2e-2
    # A gradient without strides of its own.
    torch.autograd.grad(sparse_attention(q, k, v).sum(), q)[0].isfinite().all()


def sample_masks(tokens):
    kept = random_tiles(2, 4, tokens, 128)

    def listed(b, h, q, kv):
        return kept[b, h, q // 128, kv // 128] & (kv <= q)

    return {"causal": (lambda b, h, q, kv: kv <= q, None, None), "listed": (listed, 2, 4)}


@pytest.mark.parametrize("name", ["causal", "listed"])
@pytest.mark.parametrize("tokens", [384, 512])
def test_block_mask(name, tokens):
    mask_mod, batch, heads = sample_masks(tokens)[name]
    block_mask = create_block_mask(mask_mod, batch, heads, tokens, tokens, device=DEVICE)
    pairs = create_mask(mask_mod, batch, heads, tokens, tokens, device=DEVICE)
    check(attend(block_mask), *inputs(2, 4, 2, tokens, 64), pairs)


def test_block_mask_of_documents():
    ids = document_ids(2, 512)

    def mask_mod(b, h, q, kv):
        return (kv <= q) & (ids[b, q] == ids[b, kv])

    block_mask = create_block_mask(mask_mod, 2, None, 512, 512, device=DEVICE)
    q, k, v = inputs(2, 4, 2, 512, 64)
    check(attend(block_mask, documents=ids), q, k, v, causal(512) & same_document(ids))
    # Without the argument they are intervals of keys.
    check(attend(block_mask), q, k, v, causal(512) & same_document(ids))


def causal_mod(b, h, q, kv):
    return kv <= q


def masks_of_sequences():
    """Each in 256 tokens of which all sequences and heads list the same blocks."""
    ids = torch.stack([torch.arange(256, device=DEVICE) >= first for first in (100, 40)]).long()
    prefix = torch.tensor([30, 90], device=DEVICE)

    def same_document_mod(b, h, q, kv):
        return ids[b, q] == ids[b, kv]

    return {
        "documents": lambda b, h, q, kv: (kv <= q) & same_document_mod(b, h, q, kv),
        "joined": and_masks(causal_mod, same_document_mod),
        "both ways": same_document_mod,
        "prefix": lambda b, h, q, kv: (kv <= q) | (kv < prefix[b]),
        "of neither": and_masks(causal_mod, lambda b, h, q, kv: q - kv < 70),
    }


@pytest.mark.parametrize("name", ["documents", "joined", "both ways", "prefix", "of neither"])
def test_block_mask_of_all_sequences_whose_mask_looks_at_each(name):
    mask_mod = masks_of_sequences()[name]
    block_mask = create_block_mask(mask_mod, None, None, 256, 256, device=DEVICE)
    q, k, v = inputs(2, 4, 4, 256, 64)
    check(attend(block_mask), q, k, v, create_mask(mask_mod, 2, 4, 256, 256, device=DEVICE))
    q, k, v = (x.detach() for x in (q, k, v))
    assert error(sparse_attention(q, k, v, block_mask), flex_attention(q, k, v, block_mask=block_mask)) < TOLERANCE
    # Where the mask does not look at sequences, one of them is evaluated; and never more than one head.
    lists = block_mask_module._listed(block_mask, 256, 2, 4, differ=False)
    assert lists.kept.shape[:2] == (1 if name == "of neither" else 2, 1)


def test_block_mask_of_the_first_sequences_documents_is_refused():
    ids = torch.stack([torch.arange(256, device=DEVICE) >= first for first in (100, 40)]).long()
    block_mask = create_block_mask(lambda b, h, q, kv: (kv <= q) & (ids[0, q] == ids[0, kv]), None, None, 256, 256,
                                   device=DEVICE)
    q, k, v = inputs(2, 4, 2, 256, 64)
    with pytest.raises(NotImplementedError, match="beside documents it must be causal within them"):
        sparse_attention(q, k, v, block_mask, documents=ids)
    alike = ids[:1].expand(2, -1)
    check(attend(block_mask, documents=alike), q, k, v, causal(256) & same_document(alike))


def test_block_mask_of_other_sequences_and_heads_is_refused():
    q, k, v = inputs(2, 4, 2, 256, 64)
    for batch, heads, message in ((3, None, "BlockMask's counts has 3 for batch; it must be 1 or q's 2"),
                                  (None, 2, "BlockMask's counts has 2 for heads; it must be 1 or q's 4")):
        with pytest.raises(ValueError, match=message):
            sparse_attention(q, k, v, create_block_mask(causal_mod, batch, heads, 256, 256, device=DEVICE))


@pytest.mark.parametrize("causal_lists", [False, True])
def test_blocks_of_different_sizes(causal_lists):
    tokens, query_edges, key_edges = 700, [0, 64, 256, 448], [0, 192, 256, 512, 640]
    kept = torch.rand(1, 4, 4, 5, generator=torch.Generator().manual_seed(4)).to(DEVICE) < 0.5
    blocks = kernels.tiles_from_edges(kept, query_edges, key_edges, tokens=tokens, causal=causal_lists)
    of_query, of_key = (torch.bucketize(torch.arange(tokens), torch.tensor(edges), right=True).to(DEVICE) - 1
                        for edges in (query_edges, key_edges))
    pairs = kept[:, :, of_query][..., of_key]
    if causal_lists:
        check(attend(blocks), *inputs(1, 4, 2, tokens, 64), pairs & causal(tokens))
    else:
        check(attend(blocks, mask="full"), *inputs(1, 4, 2, tokens, 64), pairs)


def test_block_mask_without_a_mask_mod():
    q, k, v = inputs(1, 2, 2, 256, 64)
    noop = BlockMask.from_kv_blocks(torch.ones(1, 1, 2, dtype=torch.int32, device=DEVICE),
                                    torch.zeros(1, 1, 2, 2, dtype=torch.int32, device=DEVICE))
    pairs = torch.zeros(256, 256, dtype=torch.bool, device=DEVICE)
    pairs[:, :128] = True
    check(attend(noop), q, k, v, pairs)


# Layers of a step wrap the same documents anew, and steps make them anew: lists are made once a step, and kept for one.
def test_lists_of_a_block_mask_are_made_once_for_each_documents():
    evaluations = []

    def mask_mod(b, h, i, j):
        evaluations.append(1)
        return (i >= j) & ((i < 100) | (j >= 100))

    block_mask = create_block_mask(mask_mod, None, None, 256, 256, device=DEVICE)
    q, k, v = inputs(1, 2, 2, 256, 64)
    calls = []
    for _ in range(3):
        starts = kernels.documents_from_lengths(torch.tensor([0, 100, 256], device=DEVICE), 256).starts
        for _ in range(3):
            before = len(evaluations)
            sparse_attention(q, k, v, block_mask, documents=kernels.Documents(starts))
            calls.append(len(evaluations) - before)
    assert all(first > 0 and second == third == 0 for first, second, third in zip(*[iter(calls)] * 3)), calls
    assert len(block_mask_module._converted[block_mask]) == 1


def test_deterministic():
    kept = random_tiles(1, 4, 1000, 64)
    blocks = kernels.tiles_from_mask(kept, tokens=1000, tile=64)
    q, k, v = inputs(1, 4, 2, 1000, 64)

    def gradients():
        out = sparse_attention(q, k, v, blocks, deterministic=True)
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    first = gradients()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients()))


def test_documents():
    ids = torch.tensor([[4, 4, 2, 2, 2, 4], [0, 1, 1, 1, 1, 1]], device=DEVICE)
    starts = torch.tensor([[0, 0, 2, 2, 2, 5], [0, 1, 1, 1, 1, 1]], dtype=torch.int32, device=DEVICE)
    assert torch.equal(kernels.documents_from_ids(ids).starts, starts)
    positions = torch.tensor([[0, 1, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4]], device=DEVICE)
    assert torch.equal(kernels.documents_from_position_ids(positions).starts, starts)
    for b, lengths in enumerate(([0, 2, 5, 6], [0, 1, 1, 6])):
        cu_seqlens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        assert torch.equal(kernels.documents_from_lengths(cu_seqlens, 6).starts, starts[b : b + 1])
