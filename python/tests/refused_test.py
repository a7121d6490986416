"""Arguments that would mean something else, or lead outside of memory, are refused by name."""

import functools
import math
import re

import pytest
import torch
from oracle import CUDA, DEVICE, TOLERANCE, document_ids, error, inputs, random_tiles

from ringleader import kernels
from ringleader.kernels import sparse_attention

TOKENS = 300  # 3 tiles of 128
q_k_v = functools.cache(lambda: inputs(2, 4, 2, TOKENS, 64))


def numbers(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def attend(blocks=None, **arguments):
    return sparse_attention(*q_k_v(), blocks, **arguments)


def diagonals(blocks=3, tile=128):
    return kernels.block_diagonals(torch.zeros(2, 4, blocks, dtype=torch.bool, device=DEVICE), tile=tile)


def columns(positions, counts=2, tokens=TOKENS, dtype=torch.int64):
    of_heads = positions if isinstance(positions, torch.Tensor) else numbers(*positions)
    return kernels.selected_columns(of_heads.expand(2, 4, -1), torch.full((2, 4), counts, dtype=dtype, device=DEVICE),
                                    tokens=tokens)


def lists(counts=(1, 1, 2), indices=((0, 0), (1, 0), (2, 1)), **arguments):
    counts, indices = (x if isinstance(x, torch.Tensor) else numbers(*x) for x in (counts, indices))
    return kernels.tiles_from_lists(counts, indices, **{"tokens": TOKENS, "heads": 4, "batch": 2, **arguments})


def without_heads(q, k, v):
    return sparse_attention(q[:, :0], k, v)


def on_meta(names):
    return sparse_attention(*(x.to("meta") if name in names else x for name, x in zip("qkv", q_k_v())))


ONE_HEAD = torch.zeros(1, 1, 3, 3, dtype=torch.bool)

# What types, shapes and devices say, on every device.
AT_ONCE = {
    "columns of longer sequences": (lambda: attend(diagonals(), columns=columns((10, 310), tokens=400)),
                                    "columns were selected from 400 tokens; q has 300"),
    "columns of shorter sequences": (lambda: attend(diagonals(), columns=columns((10, 20), tokens=200)),
                                     "columns were selected from 200 tokens; q has 300"),
    "columns in diagonals": (lambda: attend(diagonals()._replace(columns=columns((10, 310), tokens=400))),
                             "columns were selected from 400 tokens; q has 300"),
    "a choice from longer sequences": (
        lambda: attend(kernels.VerticalSlash()(*(x.repeat(1, 1, 2, 1) for x in q_k_v()[:2]))), "blocks has 5 diagonals of 128"),
    "diagonals of another tile": (lambda: attend(diagonals(tile=64)), "blocks has 3 diagonals of 64 x 64 .* 300 tokens have 5"),
    "too many diagonals": (lambda: attend(diagonals(4)), "blocks has 4 diagonals of 128 x 128 .* 300 tokens have 3"),
    "no diagonals": (lambda: diagonals(0), "kept is torch.bool .2, 4, 0."),
    "float positions": (lambda: columns(torch.tensor([1.7, 3.2])), "positions is torch.float32 .* must be integers"),
    "bool positions": (lambda: columns(torch.tensor([True, False])), "positions is torch.bool .* must be integers"),
    "float counts of columns": (lambda: columns((1, 2), 1.5, dtype=torch.float32), "counts is torch.float32 .* be integers"),
    "float counts": (lambda: lists(counts=torch.tensor([1.0, 1.0, 2.0])), "counts is torch.float32 .* must be integers"),
    "float indices": (lambda: lists(indices=torch.ones(3, 2)), "indices is torch.float32 .* must be integers"),
    "other rows": (lambda: lists(numbers(1, 1), numbers((0, 0), (1, 0))), "counts has 2 rows .* must be 3"),
    "counts without dimensions": (lambda: lists(numbers(1)[0], numbers(0)), r"counts is \[\]"),
    "a block size of one number": (lambda: lists(block_size=(128,)), "block_size is "),
    "a float block size": (lambda: lists(block_size=128.0), "block_size is 128.0"),
    "full counts alone": (lambda: lists(full_counts=numbers(1, 1, 1)), "full_counts is .* full_indices is a NoneType"),
    "full indices alone": (lambda: lists(full_indices=numbers((0,), (0,), (0,))), "full_counts is a NoneType and full_indices"),
    "other full rows": (lambda: lists(full_counts=numbers(1, 1), full_indices=numbers((0,), (0,))), "full_counts has 2 rows"),
    "no edges": (lambda: kernels.tiles_from_edges(ONE_HEAD[:, :, :0, :0], [], [], tokens=TOKENS), r"query_edges is \[\]"),
    "float kept": (lambda: kernels.tiles_from_edges(ONE_HEAD.float(), [0, 128, 256], [0, 128, 256], tokens=TOKENS),
                   "kept is torch.float32"),
    "a list as mask": (lambda: kernels.tiles_from_mask([[1]], tokens=TOKENS), "mask is a list"),
    "a mask of no tokens": (lambda: kernels.tiles_from_mask(ONE_HEAD[:, :, :0, :0], tokens=0), "tokens is 0"),
    "lists of no tokens": (lambda: lists(tokens=0), "tokens is 0"),
    "edges of no tokens": (lambda: kernels.tiles_from_edges(ONE_HEAD, [0], [0], tokens=-5), "tokens is -5"),
    "columns of no tokens": (lambda: columns((1, 2), tokens=0), "tokens is 0"),
    "documents of no tokens": (lambda: kernels.documents_from_lengths(numbers(0, 0), 0), "tokens is 0"),
    "no sums": (lambda: kernels.documents_from_lengths(numbers(), TOKENS), r"cu_seqlens is \[0\]"),
    "sums of NumPy": (lambda: kernels.documents_from_lengths(numbers(0, TOKENS).cpu().numpy(), TOKENS),
                      "cu_seqlens is a ndarray; it must be integers"),
    **{f"{what}{beside}": (lambda window=window, arguments=arguments: attend(kernels.SlidingWindow(*window), **arguments), message)
       for what, window, message in (
           ("a window of half a token", (3.5,), "tokens of SlidingWindow is 3.5; it must be a positive integer"),
           ("True as a sliding window", (True,), "tokens of SlidingWindow is True; it must be a positive integer"),
           ("a window of nothing", (0,), "tokens of SlidingWindow is 0; it must be a positive integer"),
           ("a window of tiles of 32", (5, 32), "tile is 32; 64 and 128 are supported"))
       for beside, arguments in (("", {}), (" beside a mask", {"mask": "full"}))},
    "no window": (lambda: kernels.key_intervals("causal_window", TOKENS, window=0), "window is 0; it must be a positive"),
    "a negative window": (lambda: kernels.key_intervals("full", TOKENS).within_window(-(2**32)), "window is -4294967296"),
    "False as a window": (lambda: kernels.key_intervals("full", TOKENS).within_window(False), "window is False"),
    "no block": (lambda: kernels.key_intervals("causal", TOKENS, block=0), "block is 0; it must be a positive integer"),
    "a negative block": (lambda: kernels.key_intervals("causal", TOKENS, block=-(2**32)), "block is -4294967296"),
    "complex ids": (lambda: attend(documents=torch.zeros(2, TOKENS, dtype=torch.complex64)), "ids is torch.complex64"),
    "starts without a batch": (lambda: attend(documents=kernels.Documents(torch.zeros(TOKENS, dtype=torch.int32))),
                               r"documents are of \[300\] tokens"),
    "q=None": (lambda: sparse_attention(None, *q_k_v()[1:]), "q is a NoneType"),
    "k=None": (lambda: sparse_attention(q_k_v()[0], None, q_k_v()[2]), "k is None"),
    "v=None": (lambda: sparse_attention(*q_k_v()[:2], None), "v is None"),
    "a choice of k=None": (lambda: kernels.Moba()(q_k_v()[0], None), "k is a NoneType"),
    "no heads": (lambda: without_heads(*q_k_v()), "q is .2, 0, 300, 64.; it must have heads"),
    "a float prefix": (lambda: kernels.key_intervals("prefix_causal", TOKENS, prefix=torch.tensor([[5.5], [90.0]])),
                       "prefix is torch.float32"),
    "a bool prefix": (lambda: kernels.key_intervals("prefix_causal", TOKENS, prefix=torch.tensor([[True]])),
                      "prefix is torch.bool"),
    **{f"{prefix!r} as a prefix of {name}": (
        lambda name=name, prefix=prefix: kernels.key_intervals(
            name, TOKENS, prefix=prefix, documents=document_ids(2, TOKENS) if "documents" in name else None),
        f"prefix is {re.escape(repr(prefix))}; it must be an integer, or a tensor")
       for name in ("prefix_causal", "prefix_documents")
       for prefix in (2.7, math.nan, math.inf, 3.0, True, "3", None, [3])},
    "no queries that estimate": (lambda: kernels.VerticalSlash(estimate_queries=-3)(*q_k_v()[:2]), "estimate_queries is -3"),
    "no columns": (lambda: attend(kernels.VerticalSlash(max_columns=0)), "max_columns is 0; it must be a positive integer"),
    "fewer columns than none": (lambda: attend(kernels.VerticalSlash(max_columns=-1)), "max_columns is -1; it must be a positive"),
    "fewer diagonals than none": (lambda: attend(kernels.VerticalSlash(max_diagonals=-1)), "max_diagonals is -1; it must be"),
    "a class as blocks": (lambda: attend(kernels.VerticalSlash), "blocks is a type"),
    "k elsewhere": (lambda: on_meta("k"), "k is on meta and q on "),
    "v elsewhere": (lambda: on_meta("v"), "v is on meta and q on "),
    "k and v elsewhere": (lambda: on_meta("kv"), "k is on meta and q on "),
    "documents elsewhere": (lambda: attend(documents=document_ids(2, TOKENS).to("meta")), "documents is on meta and q on "),
    "lists elsewhere": (lambda: attend(diagonals()._replace(bits=diagonals().bits.to("meta"))), "blocks is on meta and q on "),
    "diagonals of fewer words": (
        lambda: attend(diagonals()._replace(bits=diagonals().bits[..., :0], blocks=None), mask="full"),
        "blocks.bits has 0 words of 64 diagonals; q's 300 tokens have 3"),
    "groups of no share": (lambda: attend(kernels.KeyGroups(density=0.0)), r"density is 0; it must lie in \(0, 1\]"),
    "groups of another length": (lambda: attend(kernels.KeyGroups()(*(x[:, :, :100] for x in q_k_v()[:2]))),
                                 "blocks.diagonals|blocks.bits must be dense"),
    "groups under another mask": (lambda: attend(kernels.KeyGroups(), mask="full"), "blocks is a KeyGroups"),
    "k of a choice elsewhere": (lambda: kernels.XAttention()(q_k_v()[0], q_k_v()[1].to("meta")), "k is on meta and q on "),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_refused_at_once(name):
    call, message = AT_ONCE[name]
    with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
        call()


@pytest.mark.skipif(not CUDA, reason="the CPU adds gradients in order")
def test_key_groups_have_no_deterministic_gradients_on_gpus():
    q, k, v = q_k_v()
    out = sparse_attention(q.requires_grad_(), k, v, kernels.KeyGroups(), deterministic=True)
    with pytest.raises(RuntimeError, match="deterministic: GPUs add gradients of key groups in any order"):
        out.sum().backward()


@pytest.mark.skipif(CUDA, reason="values are checked on the device, without waiting for it")
def test_key_groups_whose_rows_are_not_theirs():
    q, k, v = q_k_v()
    choice = kernels.KeyGroups()(q, k)
    with pytest.raises(RuntimeError, match="blocks.rows are not where the bits of 300 tokens begin"):
        sparse_attention(q, k, v, choice._replace(rows=choice.rows + 1))


CU_SEQLENS = "cu_seqlens must be sums of lengths, which ascend from 0 to tokens"


# A GPU's assertion ends its process's use of it.
@pytest.mark.skipif(CUDA, reason="values are checked on the device, without waiting for it")
@pytest.mark.parametrize("make, message", [
    (lambda: columns((2**63 - 1, 3)), "positions must differ and lie in .0, 300"),
    (lambda: columns((3, 2**63 - 1, 2**63 - 1), 3), "positions must differ and lie in .0, 300"),
    (lambda: columns((1, 2), -1), "counts must lie in .0, 2.*positions"),
    (lambda: columns((1, 2), 3), "counts must lie in .0, 2.*positions"),
    (lambda: lists((1, 1, -2)), "counts must lie in .0, 2.*indices"),
    (lambda: lists((1, 1, 3)), "counts must lie in .0, 2.*indices"),
    (lambda: lists(indices=((0, 0), (1, 0), (-1, 1))), "indices of listed blocks must lie in .0, 3"),
    (lambda: lists(full_counts=numbers(2, 0, 0), full_indices=numbers((0,), (0,), (0,))), "full_counts must lie in .0, 1"),
    *((lambda sums=sums: kernels.documents_from_lengths(numbers(*sums), TOKENS), CU_SEQLENS)
      for sums in ([130, 100, 70], [0, 50, 120], [50, 120, 300], [0, 120, 50, 300], [0, 50, 250], [0, -1, 300], [0, 50, 350])),
])
def test_values_are_refused_when_they_are_made_into_blocks(make, message):
    with pytest.raises(RuntimeError, match=message):
        make()


def test_what_is_unusual_and_right():
    everything = numbers(0, 1, 2, dtype=torch.uint8).expand(3, -1)
    assert error(attend((numbers(3, 3, 3, dtype=torch.uint8), everything)), attend()) < TOLERANCE
    many = 300 * 128  # more blocks than a byte can tell
    last = kernels.tiles_from_lists(numbers(*[1] * 300, dtype=torch.uint8), numbers(*[[7]] * 300, dtype=torch.uint8),
                                    tokens=many, heads=1)
    assert last.row_offsets[0, 0, -1] == 293 and (last.columns[:293] == 7).all()
    # A document without tokens, and sums that are padded at their end.
    assert torch.equal(kernels.documents_from_lengths(numbers(0, 50, 50, 300, 300), TOKENS).starts,
                       kernels.documents_from_lengths(numbers(0, 50, 300), TOKENS).starts)


def by_hand():
    tiles = kernels.tiles_from_mask(random_tiles(2, 4, TOKENS, 128), tokens=TOKENS)
    capacity, places = len(tiles.columns), tiles.row_offsets.shape

    def offsets(value, at=-1, of=tiles.row_offsets):
        changed = of.clone()
        changed.view(-1)[at] = value
        return changed

    def columns(positions, count=2):
        return diagonals()._replace(columns=kernels.Columns(
            numbers(*positions).expand(2, 4, -1).contiguous(), torch.full((2, 4), count, dtype=torch.int32, device=DEVICE)))

    past = torch.full(places, capacity + 1, dtype=torch.int32, device=DEVICE)
    return {
        "row_offsets beyond columns": (tiles._replace(row_offsets=offsets(capacity + 5)), "blocks.row_offsets of head 7"),
        "row_offsets before columns": (tiles._replace(row_offsets=offsets(-3, 0)), "blocks.row_offsets of head 0.* -3"),
        "row_offsets that descend": (tiles._replace(row_offsets=offsets(capacity, 0)), "blocks.row_offsets of head 0"),
        "row_offsets all beyond": (tiles._replace(row_offsets=past), "blocks.row_offsets of head 0"),
        "columns beyond the tiles": (tiles._replace(columns=tiles.columns + 3), "blocks.columns has .* there are 3 tiles"),
        "columns before the tiles": (tiles._replace(columns=tiles.columns - 3), "blocks.columns has -.* there are 3 tiles"),
        "column_offsets beyond rows": (tiles._replace(column_offsets=offsets(capacity + 5, of=tiles.column_offsets)),
                                       "blocks.column_offsets of head 7"),
        "rows beyond the tiles": (tiles._replace(rows=tiles.rows + 3), "blocks.rows has .* there are 3 tiles"),
        "columns that descend": (tiles._replace(columns=2 - tiles.columns), "blocks.columns has . after .*must ascend"),
        "positions beyond the tokens": (columns((10, 310)), "blocks.column_positions has 310 for head 0"),
        "positions before the tokens": (columns((-7, 10)), "blocks.column_positions has -7 for head 0"),
        "positions twice": (columns((10, 10)), "blocks.column_positions has 10 .*must ascend"),
        "positions of unused places": (columns((10, 2**63 - 1)), "blocks.column_positions has 9223372036854775807"),
        "counts beyond the positions": (columns((10, 20), 3), "blocks.column_counts has 3 for head 0"),
        "negative counts": (columns((10, 20), -1), "blocks.column_counts has -1 for head 0"),
    }


@pytest.mark.skipif(CUDA, reason="what is in tuples made by hand is not checked on GPUs")
@pytest.mark.parametrize("name", [
    "row_offsets beyond columns", "row_offsets before columns", "row_offsets that descend", "row_offsets all beyond",
    "columns beyond the tiles", "columns before the tiles", "column_offsets beyond rows", "rows beyond the tiles",
    "columns that descend", "positions beyond the tokens", "positions before the tokens", "positions twice", "positions of unused places",
    "counts beyond the positions", "negative counts"])
def test_tuples_made_by_hand_lead_nowhere_else(name):
    blocks, message = by_hand()[name]
    with pytest.raises(RuntimeError, match=message):
        attend(blocks)
