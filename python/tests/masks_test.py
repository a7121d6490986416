"""sparse_attention under masks as intervals of keys, forward and backward, against float64."""

import pytest
import torch
from oracle import DEVICE, attend, causal, check, document_ids, inputs, pairs_of_diagonals, pairs_of_tiles, random_tiles, same_document
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from ringleader import kernels
from ringleader.kernels import attention, masks, sparse_attention
from ringleader.kernels.blocks import CSR, UNMASKED_CSR
from ringleader.kernels.operators import ops


def visible_of(name, tokens, starts, window, prefix, block):
    """[batch, tokens, tokens] by the definition; starts: [batch, tokens]"""
    i = torch.arange(tokens, device=DEVICE).view(1, -1, 1)
    j = torch.arange(tokens, device=DEVICE).view(1, 1, -1)
    start, start_of_key = starts.unsqueeze(2), starts.unsqueeze(1)
    own = start == start_of_key
    near = (i - j).abs() < window
    question = start_of_key == 0
    second = torch.where(starts > 0, starts, tokens).min(1).values.view(-1, 1, 1)  # the first answer
    return {
        "full": i >= 0,
        "causal": j <= i,
        "full_window": near,
        "causal_window": near & (j <= i),
        "full_documents": own,
        "causal_documents": own & (j <= i),
        "shared_question": (own | question | ((start == second) & (start_of_key <= second))) & (j <= i),
        "causal_blockwise": (own | (start == starts[:, -1:].unsqueeze(2))) & (j <= i),
        "global_sliding": near | (j < window) | (i < window),
        "prefix_causal": (j <= i) | (j < prefix),
        "prefix_documents": own & ((j <= i) | (j < start + prefix)),
        "block_causal_documents": own & ((j - start) // block <= (i - start) // block),
    }[name].expand(starts.shape[0], tokens, tokens)


OF_DOCUMENTS = ("full_documents", "causal_documents", "shared_question", "causal_blockwise", "prefix_documents",
                "block_causal_documents")


@pytest.mark.parametrize("name", masks.NAMES)
@pytest.mark.parametrize("tokens", [300, 512])
def test_masks(name, tokens):
    ids = document_ids(2, tokens)
    starts = kernels.documents_from_ids(ids).starts.long()
    visible = visible_of(name, tokens, starts, 40, 70, 50)
    mask = kernels.key_intervals(name, tokens, documents=ids if name in OF_DOCUMENTS else None, window=40, prefix=70,
                                 block=50, device=DEVICE)
    assert not mask.causal or not (visible & ~causal(tokens)).any()
    rows = mask.rows.long().expand(2, -1, -1).unsqueeze(2)
    j = torch.arange(tokens, device=DEVICE)
    in_rows = ((rows[..., 0] <= j) & (j < rows[..., 1])) | ((rows[..., 2] <= j) & (j < rows[..., 3]))
    assert torch.equal(in_rows, visible)
    assert (rows[..., 1:] >= rows[..., :-1]).all()
    check(attend(mask=mask), *inputs(2, 4, 2, tokens, 64), visible.unsqueeze(1))
    kept = random_tiles(2, 4, tokens, 64)
    kept[0, 1, 2] = False
    blocks = kernels.tiles_from_mask(kept, tokens=tokens, tile=64, causal=mask.causal)
    check(attend(blocks, mask=mask), *inputs(2, 4, 2, tokens, 64),
          visible.unsqueeze(1) & pairs_of_tiles(kept, tokens, 64))


@pytest.mark.parametrize("name", OF_DOCUMENTS)
def test_documents_of_one_sequence(name):
    """They are of every sequence of a batch, as those of sparse_attention."""
    ids = document_ids(1, 300)
    of_one, of_a_batch = (kernels.key_intervals(name, 300, documents=x, prefix=70, block=50) for x in (ids[0], ids))
    assert of_one.rows.shape == (1, 300, 4) and torch.equal(of_one.rows, of_a_batch.rows)
    q, k, v = inputs(2, 4, 2, 300, 64)
    if name == "causal_documents":
        assert torch.equal(sparse_attention(q, k, v, mask=of_one), sparse_attention(q, k, v, mask=of_a_batch))
    with pytest.raises(ValueError, match="documents are of 300 tokens; the mask is of 301"):
        kernels.key_intervals(name, 301, documents=ids[0])


@pytest.mark.parametrize("name", masks.NAMES)
def test_windows_and_diagonals_beside_masks(name):
    tokens, ids = 300, document_ids(2, 300)
    visible = visible_of(name, tokens, kernels.documents_from_ids(ids).starts.long(), 60, 70, 50).unsqueeze(1)
    mask = kernels.key_intervals(name, tokens, documents=ids if name in OF_DOCUMENTS else None, window=60, prefix=70,
                                 block=50, device=DEVICE)
    i = torch.arange(tokens, device=DEVICE)
    near = (i.unsqueeze(1) - i).abs() < 37
    check(attend(kernels.SlidingWindow(37), mask=mask), *inputs(2, 4, 2, tokens, 64), visible & near)
    kept = torch.rand(2, 4, 5, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.5
    kept[..., 0] = True
    check(attend(kernels.block_diagonals(kept, tile=64), mask=mask), *inputs(2, 4, 2, tokens, 64),
          visible & pairs_of_diagonals(kept, tokens, 64))


LONG = [300, 2**31 - 1, 2**31, 2**32, 2**63 - 1]


@pytest.mark.parametrize("size", LONG)
def test_windows_and_blocks_as_long_as_the_sequence(size):
    """They are the masks without them."""
    ids = document_ids(2, 300)
    for name, without in ("full_window", "full"), ("causal_window", "causal"), ("global_sliding", "full"):
        windowed, wanted = (kernels.key_intervals(x, 300, window=size, device=DEVICE) for x in (name, without))
        assert torch.equal(windowed.rows, wanted.rows)
        assert torch.equal(wanted.within_window(size).rows, wanted.rows)
    of_documents = kernels.key_intervals("full_documents", 300, documents=ids)
    assert torch.equal(kernels.key_intervals("block_causal_documents", 300, documents=ids, block=size).rows, of_documents.rows)
    everything = torch.ones(300, 300, dtype=torch.bool, device=DEVICE)
    check(attend(kernels.SlidingWindow(size), mask="full"), *inputs(2, 4, 2, 300, 64), everything)
    check(attend(kernels.SlidingWindow(size), mask=of_documents), *inputs(2, 4, 2, 300, 64), same_document(ids))


def numbers_of(value):
    """An integer, and the tensors of it that `prefix` may be."""
    types = [x for x in (torch.uint8, torch.int32, torch.int64) if torch.iinfo(x).min <= value <= torch.iinfo(x).max]
    return value, *(torch.tensor(x, dtype=dtype, device=DEVICE) for dtype in types for x in (value, [[value]], [[value]] * 2))


@pytest.mark.parametrize("size", LONG)
def test_prefixes_beyond_the_sequence(size):
    ids = document_ids(2, 300)

    def rows(name, **arguments):
        documents = ids if name in OF_DOCUMENTS else None
        return kernels.key_intervals(name, 300, documents=documents, device=DEVICE, **arguments).rows.expand(2, -1, -1)

    for value, whole, of_documents in (size, "full", "full_documents"), (-size, "causal", "causal_documents"):
        for prefix in numbers_of(value):
            assert torch.equal(rows("prefix_causal", prefix=prefix), rows(whole))
            assert torch.equal(rows("prefix_documents", prefix=prefix), rows(of_documents))
    for prefix in numbers_of(255):  # a type that has no 300
        assert torch.equal(rows("prefix_causal", prefix=prefix), rows("prefix_causal", prefix=255))


def test_full():
    everything = torch.ones(300, 300, dtype=torch.bool, device=DEVICE)
    check(attend(mask="full"), *inputs(2, 4, 2, 300, 64), everything)
    ids = document_ids(2, 300)
    check(attend(mask="full", documents=ids), *inputs(2, 4, 2, 300, 128), same_document(ids))
    kept = random_tiles(2, 1, 300, 128)
    lists = kept.sum(-1), kept.int().argsort(-1, descending=True)
    check(attend(lists, mask="full"), *inputs(2, 4, 2, 300, 64), pairs_of_tiles(kept, 300, 128))
    near = (torch.arange(300, device=DEVICE).unsqueeze(1) - torch.arange(300, device=DEVICE)).abs() < 50
    check(attend(kernels.SlidingWindow(50), mask="full"), *inputs(2, 4, 2, 300, 64), near)
    check(attend(kernels.SlidingWindow(50), mask="full", documents=ids), *inputs(2, 4, 2, 300, 64), near & same_document(ids))


@pytest.mark.parametrize("tile,head_dim", [(64, 64), (64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize("tokens", [384, 300])
def test_lists_without_a_mask(tile, head_dim, tokens, monkeypatch):
    """Whole tiles are attended to without intervals, ahead of queries and behind them, and rows of no tiles are zero."""
    patterns = []

    def seen(q, k, v, pattern, *rest, **others):
        patterns.append((pattern, others.get("intervals") is None))
        return ops.attention.default(q, k, v, pattern, *rest, **others)

    kept = random_tiles(2, 4, tokens, tile)
    kept[1, 2, 1] = False
    lists = kernels.tiles_from_mask(kept, tokens=tokens, tile=tile, causal=False)
    for mask in "full", kernels.key_intervals("full", tokens, device=DEVICE):
        check(attend(lists, mask=mask), *inputs(2, 4, 2, tokens, head_dim), pairs_of_tiles(kept, tokens, tile))
        monkeypatch.setattr(attention, "_attention", seen)
        sparse_attention(*inputs(2, 4, 2, tokens, head_dim), lists, mask=mask, return_lse=True)
        monkeypatch.undo()
    assert patterns == [(UNMASKED_CSR, True) if tokens % tile == 0 else (CSR, False)] * 2
    with pytest.raises(ValueError, match="mask has rows of"):
        sparse_attention(*inputs(2, 4, 2, tokens, head_dim), lists, mask=kernels.key_intervals("full", 64, device=DEVICE))


def test_a_block_mask_that_shows_all_of_its_blocks_is_full():
    kept = random_tiles(1, 4, 512, 128)  # others in each head
    found = create_block_mask(lambda b, h, q, kv: kept[b, h, q // 128, kv // 128], 1, 4, 512, 512, device=DEVICE)
    assert kernels.tiles_from_block_mask(found, heads=4).mask.full
    check(attend(found), *inputs(1, 4, 2, 512, 64), pairs_of_tiles(kept, 512, 128))


def test_prefixes_of_the_data():
    ids = document_ids(2, 300)
    starts = kernels.documents_from_ids(ids).starts.long()
    prefix = torch.tensor([[30], [90]], device=DEVICE)
    mask = kernels.key_intervals("prefix_documents", 300, documents=ids, prefix=prefix)
    visible = torch.cat([visible_of("prefix_documents", 300, starts[b : b + 1], 1, prefix[b].item(), 1) for b in (0, 1)])
    check(attend(mask=mask), *inputs(2, 4, 2, 300, 64), visible.unsqueeze(1))


def test_queries_without_a_key():
    visible = torch.zeros(1, 300, 300, dtype=torch.bool, device=DEVICE)
    visible[0, 10:40, 5:260] = visible[0, 200:210, 290:] = visible[0, 200:210, :3] = True
    check(attend(mask=kernels.intervals_of_mask(visible)), *inputs(1, 4, 2, 300, 64), visible.unsqueeze(1))


def interval_mask_mods(tokens):
    kept = random_tiles(2, 4, tokens, 128)
    prefix = torch.tensor([100, 300], device=DEVICE)
    return {
        "full": lambda b, h, q, kv: q >= 0,
        "window": lambda b, h, q, kv: (q - kv).abs() < 50,
        "sinks": lambda b, h, q, kv: (kv <= q) & ((q - kv < 150) | (kv < 4)),
        "prefix": lambda b, h, q, kv: (kv <= q) | (kv < prefix[b]),
        "listed": lambda b, h, q, kv: kept[b, h, q // 128, kv // 128] & ((q - kv).abs() < 200),
    }


@pytest.mark.parametrize("name", ["full", "window", "sinks", "prefix", "listed"])
@pytest.mark.parametrize("tokens", [384, 500])
def test_block_mask_of_intervals(name, tokens):
    mask_mod = interval_mask_mods(tokens)[name]
    block_mask = create_block_mask(mask_mod, 2, 4, tokens, tokens, device=DEVICE)
    pairs = create_mask(mask_mod, 2, 4, tokens, tokens, device=DEVICE)
    check(attend(block_mask), *inputs(2, 4, 2, tokens, 64), pairs)


def test_block_mask_that_is_not_of_intervals_is_refused():
    q, k, v = inputs(1, 2, 2, 256, 64)

    def refused(mask_mod, message, heads=None, **arguments):
        block_mask = create_block_mask(mask_mod, None, heads, 256, 256, device=DEVICE)
        with pytest.raises(NotImplementedError, match=message):
            sparse_attention(q, k, v, block_mask, **arguments)

    refused(lambda b, h, q, kv: kv % 3 == 0, "query 0 keys in 86 runs")
    refused(lambda b, h, q, kv: (kv % 64 < 32) | (h < 1), "query 0 of head 1 keys in 4 runs", heads=2)
    refused(lambda b, h, q, kv: (q - kv).abs() < 50, "beside documents it must be causal", documents=torch.zeros(
        1, 256, dtype=torch.int64, device=DEVICE))
