"""What attention visits, as the kernels take it. All but the check of a BlockMask is made on the device, without waiting
for it.

A tile is `tile` x `tile` tokens, 64 or 128. Tensors have a part for each sequence and query head. The named tuples are
made by the functions here and by choices.py; the values in tuples made by hand are not checked on GPUs.
"""

import weakref
from typing import NamedTuple, Optional

import torch

from ringleader.kernels.masks import KeyIntervals, rows_of_runs
from ringleader.kernels.operators import ops

# ringleader::kernels::TilePattern
FULL, CAUSAL, WINDOW, TOEPLITZ, CSR = range(5)


class SlidingWindow(NamedTuple):
    """The last `tokens` tokens, a query's own included."""

    tokens: int
    tile: int = 128

    def visit(self):
        return WINDOW, [], self.tile, self.tokens


class Columns(NamedTuple):
    """Keys that all later queries of a head see (verticals)."""

    positions: torch.Tensor  # [batch, heads, max_columns] int64, ascending; unused slots at the end hold 2^63 - 1
    counts: torch.Tensor  # [batch, heads] int32


class Diagonals(NamedTuple):
    """Block diagonals (slashes), and columns beside them."""

    bits: torch.Tensor  # [batch, heads, words] int64: bit d % 64 of word d / 64: block A sees block A - d
    columns: Optional[Columns] = None
    tile: int = 128
    visited: Optional[torch.Tensor] = None  # [batch] int64: tiles of the diagonals over all heads, where known

    def visit(self):
        return TOEPLITZ, [self.bits, *(self.columns or ())], self.tile, 0


class TileLists(NamedTuple):
    """Lists of tiles in both directions, offsets into the lists of the whole batch."""

    row_offsets: torch.Tensor  # [batch, heads, tiles + 1] int32
    columns: torch.Tensor  # [capacity] int32: key tiles by query tile
    column_offsets: torch.Tensor  # [batch, heads, tiles + 1] int32
    rows: torch.Tensor  # [capacity] int32: query tiles by key tile
    tile: int = 128
    causal: bool = True  # tiles ahead of all of a row's queries were left out
    mask: Optional[KeyIntervals] = None  # of what listed tiles show, where that is not causal

    def visit(self):
        return CSR, list(self[:4]), self.tile, 0


class QueryBlocks(NamedTuple):
    """Blocks that each query chose for itself, and the tiles in which one did (MoBA)."""

    lists: TileLists
    queries: torch.Tensor  # [batch, heads, blocks, words] int32, a bit for each query
    block_size: int

    def visit(self):
        return CSR, [*self.lists[:4], self.queries], self.lists.tile, self.block_size


def lists_of_all_tiles(kept, tile):
    """kept: [batch, heads, tiles, tiles] bool. Tiles ahead of their queries are listed, too."""
    batch, heads, tiles, _ = kept.shape

    def lists(kept):
        counts = kept.sum(-1, dtype=torch.int32).flatten()
        ends = counts.cumsum(0, dtype=torch.int32)
        first = (ends - counts).view(batch, heads, tiles)
        offsets = torch.cat([first, ends.view(batch, heads, tiles)[..., -1:]], -1)
        # A listed tile goes to its place, and the others go after all of them.
        places = torch.where(kept.flatten(), kept.flatten().cumsum(0) - 1, kept.numel())
        numbers = torch.arange(tiles, device=kept.device, dtype=torch.int32).expand(kept.shape).flatten()
        listed = torch.zeros(kept.numel() + 1, dtype=torch.int32, device=kept.device).scatter_(0, places, numbers)
        return offsets.contiguous(), listed[:-1]

    return TileLists(*lists(kept), *lists(kept.mT.contiguous()), tile, causal=False)


def lists_from_bits(chosen, tokens, tile, block_size, kept_blocks=None):
    """chosen: [batch, heads, tiles, words] int32, a bit for each block of `block_size` tokens, of which a row has at
    most `kept_blocks`. Tiles that lie ahead of all of a row's queries are left out."""
    tiles = (tokens + tile - 1) // tile
    capacity = tiles * (tiles + 1) // 2
    if kept_blocks is not None:
        capacity = min(capacity, tiles * kept_blocks * (block_size // tile))
    lists = ops.tile_lists(chosen, tokens, tile, block_size, chosen.shape[0] * chosen.shape[1] * max(capacity, 1))
    return TileLists(*lists, tile)


def _pack(bits, word, dtype):
    """[..., n] bool -> [..., ceil(n / word)] of `dtype`, little end first."""
    padding = -bits.shape[-1] % word
    bytes_of = torch.nn.functional.pad(bits, (0, padding)).view(*bits.shape[:-1], -1, 8)
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bytes_of.to(torch.uint8) << shifts).sum(-1, dtype=torch.uint8).view(dtype)


def _check_tile(tile):
    if tile not in (64, 128):
        raise ValueError(f"tile is {tile}; 64 and 128 are supported")


def tiles_from_mask(mask, *, tokens, tile=128, causal=True):
    """mask: [batch, heads, tiles, tiles] bool, which key tiles (last) each query tile attends to. causal: leave out tiles
    ahead of their queries, which masks that are not causal may show."""
    _check_tile(tile)
    tiles = (tokens + tile - 1) // tile
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[2:] != (tiles, tiles):
        raise ValueError(
            f"mask is {mask.dtype} {list(mask.shape)}; for {tokens} tokens it must be bool [batch, heads, {tiles}, {tiles}]")
    if not causal:
        return lists_of_all_tiles(mask, tile)
    return lists_from_bits(_pack(mask, 32, torch.int32), tokens, tile, tile)


def _dense(counts, indices, blocks):
    """Lists of blocks as [..., rows, blocks] bool."""
    if counts.shape != indices.shape[:-1]:
        raise ValueError(f"counts is {list(counts.shape)} and indices {list(indices.shape)}; indices must have one "
                         "dimension more than counts: [batch, heads, rows] and [batch, heads, rows, most]")
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    torch._assert_async(
        ((indices < blocks) | ~listed).all(), f"indices of listed blocks must be below {blocks}, the blocks of keys")
    mask = torch.zeros(*counts.shape, blocks + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter_(-1, torch.where(listed, indices, blocks).long(), True)[..., :blocks]


def tiles_from_lists(counts, indices, *, tokens, heads, batch=1, block_size=128, full_counts=None, full_indices=None,
                     causal=True):
    """counts: [batch, heads, rows] and indices: [batch, heads, rows, most], integers: of row A (block_size queries) the
    first counts[..., A] of indices[..., A, :] are the key blocks that it attends to, in any order. batch and heads may
    be 1, or missing, for all alike. block_size: of queries and keys alike, or (queries, keys). The lists of full
    blocks, if there are any, are attended to as well. causal: as in tiles_from_mask."""
    q_block, kv_block = (block_size, block_size) if isinstance(block_size, int) else block_size
    if q_block % 64 != 0 or kv_block % 64 != 0 or q_block <= 0 or kv_block <= 0:
        raise ValueError(f"block_size is {block_size}; queries' and keys' must be multiples of 64")
    tile = 128 if q_block % 128 == 0 and kv_block % 128 == 0 else 64
    blocks, tiles = -(-tokens // kv_block), -(-tokens // tile)
    kept = _dense(counts, indices, blocks)
    if full_counts is not None:
        kept = kept | _dense(full_counts, full_indices, blocks)
    while kept.dim() < 4:
        kept = kept.unsqueeze(0)
    if kept.shape[2] != -(-tokens // q_block):
        raise ValueError(f"counts has {kept.shape[2]} rows; {tokens} tokens are {-(-tokens // q_block)} of {q_block}")
    for name, size, wanted in (("batch", kept.shape[0], batch), ("heads", kept.shape[1], heads)):
        if size not in (1, wanted):
            raise ValueError(f"counts has {size} for {name}; it must be 1 or q's {wanted}")
    rows = kept.repeat_interleave(q_block // tile, 2)[:, :, :tiles]
    if not causal:
        all_tiles = rows.repeat_interleave(kv_block // tile, 3)[..., :tiles]
        return lists_of_all_tiles(all_tiles.expand(batch, heads, -1, -1).contiguous(), tile)
    chosen = _pack(rows, 32, torch.int32).expand(batch, heads, -1, -1).contiguous()
    return lists_from_bits(chosen, tokens, tile, kv_block, min(blocks, sum(
        x.shape[-1] for x in (indices, full_indices) if x is not None)))


def tiles_from_edges(kept, query_edges, key_edges, *, tokens, causal=True):
    """Blocks of different sizes. kept: [batch, heads, rows, blocks] bool; query_edges and key_edges: the rows' and blocks'
    first tokens, ascending from 0, multiples of 64 in host memory (lists)."""
    tile = 128 if all(edge % 128 == 0 for edge in (*query_edges, *key_edges)) else 64
    numbers = []
    for name, edges, blocks in (("query_edges", query_edges, kept.shape[2]), ("key_edges", key_edges, kept.shape[3])):
        lengths = [b - a for a, b in zip(edges, [*edges[1:], tokens])]
        if len(edges) != blocks or edges[0] != 0 or any(e % 64 for e in edges) or any(n < 1 for n in lengths):
            raise ValueError(f"{name} is {list(edges)}; it must hold {blocks} multiples of 64 that ascend from 0 to below "
                             f"{tokens}, the tokens")
        tiles = torch.tensor([-(-n // tile) for n in lengths], device=kept.device)
        numbers.append(torch.arange(blocks, device=kept.device).repeat_interleave(
            tiles, output_size=-(-tokens // tile)))
    return tiles_from_mask(kept[:, :, numbers[0]][..., numbers[1]].contiguous(), tokens=tokens, tile=tile, causal=causal)


def _shown_parts(block_mask, kept, mask_mod, tokens):
    """Of the blocks of `kept`, [batch, heads, rows, blocks], some at a time: b, h, q and kv, [blocks, 1 or q_block, 1 or
    kv_block], and what mask_mod shows of them. Waits for the device."""
    q_block, kv_block = block_mask.BLOCK_SIZE
    for part in kept.nonzero().split(512):
        b, h, row, block = (x.view(-1, 1, 1) for x in part.unbind(1))
        q = (row * q_block + torch.arange(q_block, device=kept.device).view(1, -1, 1)).clamp(max=tokens - 1)
        kv = (block * kv_block + torch.arange(kv_block, device=kept.device).view(1, 1, -1)).clamp(max=tokens - 1)
        shown = torch.ones(len(part), q_block, kv_block, dtype=torch.bool, device=kept.device)
        if mask_mod is not None:
            evaluate = mask_mod
            for dimensions in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
                evaluate = torch.vmap(evaluate, in_dims=dimensions)
            shown = evaluate(b[:, 0, 0], h[:, 0, 0], q.expand(len(part), -1, 1)[:, :, 0],
                             kv.expand(len(part), 1, -1)[:, 0]).bool()
        yield b, h, q, kv, shown


def _listed(block_mask, tokens):
    """[(kept [batch, heads, rows, blocks], mask_mod or None for blocks that are shown whole)]"""
    blocks = -(-tokens // block_mask.BLOCK_SIZE[1])
    listed = [(_dense(block_mask.kv_num_blocks, block_mask.kv_indices, blocks), block_mask.mask_mod)]
    if block_mask.full_kv_num_blocks is not None:
        listed.append((_dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, blocks), None))
    return listed


def _difference(block_mask, wants, tokens):
    """The first pair that block_mask shows otherwise than wants(b, q, kv): (query, key, whether it is shown), or None."""
    for kept, mask_mod in _listed(block_mask, tokens):
        for b, _, q, kv, shown in _shown_parts(block_mask, kept, mask_mod, tokens):
            wrong = (shown != wants(b, q, kv)).nonzero()
            if len(wrong) > 0:
                t, i, j = wrong[0].tolist()
                return q[t, i, 0].item(), kv[t, 0, j].item(), bool(shown[t, i, j])
    return None


def _intervals(block_mask, tokens):
    """[batch, tokens, 4] int32: intervals that show what the listed blocks show, taken from the first head that lists
    each of them. Raises where there are none."""
    q_block, kv_block = block_mask.BLOCK_SIZE
    parts = _listed(block_mask, tokens)
    batch, _, rows, blocks = parts[0][0].shape
    intervals = torch.zeros(batch, rows * q_block, 4, dtype=torch.int32, device=parts[0][0].device)
    for b in range(batch):
        for row in range(rows):
            shown_of = {}
            for kept, mask_mod in parts:
                here = torch.zeros_like(kept)
                first = kept[b, :, row] & (kept[b, :, row].cumsum(0) == 1)
                here[b, :, row] = first
                columns = here.nonzero()[:, 3].tolist()
                shown = [x[4] for x in _shown_parts(block_mask, here, mask_mod, tokens)]
                for column, of_block in zip(columns, torch.cat(shown) if shown else []):
                    shown_of.setdefault(column, of_block)
            if not shown_of:
                continue
            columns = sorted(shown_of)
            positions = torch.cat([torch.arange(c * kv_block, (c + 1) * kv_block) for c in columns]).to(intervals.device)
            visible = torch.cat([shown_of[c] for c in columns], -1) & (positions < tokens)
            intervals[b, row * q_block : (row + 1) * q_block] = rows_of_runs(visible, positions, row * q_block)
    return intervals[:, :tokens].contiguous()


def _mask_of(block_mask, starts, tokens):
    """None where block_mask shows, of the blocks that it lists, what a causal mask does, within documents if there are
    any; else the KeyIntervals that show the same. Raises where there are none. Evaluates mask_mod on listed blocks and
    waits for the device."""

    def causal(b, q, kv):
        wanted = kv <= q
        return wanted if starts is None else wanted & (kv >= starts[b.clamp(max=starts.shape[0] - 1), q])

    difference = _difference(block_mask, causal, tokens)
    if difference is None:
        return None
    if starts is not None:
        query, key, shown = difference
        raise NotImplementedError(
            f"blocks: the BlockMask {'shows' if shown else 'hides'} key {key} to query {query}; beside documents it must be "
            "causal within them: leave documents out where its mask_mod has them")
    try:
        rows = _intervals(block_mask, tokens)
    except NotImplementedError as error:
        raise NotImplementedError(f"blocks: a BlockMask of which {error}") from error

    def in_intervals(b, q, kv):
        x, y, z, w = rows[b.clamp(max=rows.shape[0] - 1), q].unbind(-1)
        return ((x <= kv) & (kv < y)) | ((z <= kv) & (kv < w))

    difference = _difference(block_mask, in_intervals, tokens)
    if difference is not None:
        query, key, shown = difference
        raise NotImplementedError(
            f"blocks: the BlockMask {'shows' if shown else 'hides'} key {key} to query {query} in one head and not in "
            "another; masks are alike for all heads, whose lists may differ: use FlexAttention")
    return KeyIntervals(rows)


_converted = weakref.WeakKeyDictionary()  # BlockMask -> {(batch, heads): (documents' tensor, lists)}


def tiles_from_block_mask(block_mask, *, heads, batch=1, documents=None, check=True):
    """block_mask: FlexAttention's, of equally many queries and keys. What it lists is attended to: causally, within
    `documents` if there are any, or, where mask_mod says otherwise, in the intervals of keys that it shows, of which
    each query may have two. That is found by evaluating it on the listed blocks, which waits for the device;
    check=False takes the caller's word that it is causal and does not wait."""
    from ringleader.kernels.documents import as_documents

    tokens, keys = block_mask.seq_lengths
    if tokens != keys:
        raise ValueError(f"blocks is a BlockMask of {tokens} queries and {keys} keys; there must be equally many")
    mask = _mask_of(block_mask, as_documents(documents, batch, tokens), tokens) if check else None
    return tiles_from_lists(
        block_mask.kv_num_blocks, block_mask.kv_indices, tokens=tokens, heads=heads, batch=batch,
        block_size=tuple(block_mask.BLOCK_SIZE), full_counts=block_mask.full_kv_num_blocks,
        full_indices=block_mask.full_kv_indices, causal=mask is None)._replace(mask=mask)


def tiles_of(block_mask, heads, batch, documents):
    """tiles_from_block_mask, once for each BlockMask and the documents that it last had: layers of a step share the tensor
    of these, whatever they wrap it in."""
    if torch.compiler.is_compiling():
        raise RuntimeError("blocks is a BlockMask, whose mask_mod cannot be checked inside torch.compile; pass what "
                           "tiles_from_block_mask returns for it outside")
    made_of = getattr(documents, "starts", documents)
    known = _converted.setdefault(block_mask, {})
    of_documents, lists = known.get((batch, heads), (None, None))
    if lists is None or of_documents is not made_of:
        lists = tiles_from_block_mask(block_mask, heads=heads, batch=batch, documents=documents)
        known[batch, heads] = (made_of, lists)
    return lists


def block_diagonals(kept, *, columns=None, tile=128):
    """kept: [batch, heads, blocks] bool: whether a block attends to the one that lies so many before it. The main
    diagonal, 0, always is kept."""
    _check_tile(tile)
    if kept.dtype != torch.bool or kept.dim() != 3:
        raise ValueError(f"kept is {kept.dtype} {list(kept.shape)}; it must be bool [batch, heads, blocks]")
    main = torch.arange(kept.shape[-1], device=kept.device) == 0
    return Diagonals(_pack(kept | main, 64, torch.int64), columns, tile)


def selected_columns(positions, counts, *, tokens):
    """positions: [batch, heads, most] integers, in any order; the first counts[batch, heads] count. They must differ
    and lie in the sequence, which the device checks when it comes to them."""
    if positions.dim() != 3 or counts.shape != positions.shape[:2]:
        raise ValueError(f"positions is {list(positions.shape)} and counts {list(counts.shape)}; they must be "
                         "[batch, heads, most] and [batch, heads]")
    unused = torch.iinfo(torch.int64).max
    used = torch.arange(positions.shape[-1], device=positions.device) < counts.unsqueeze(-1)
    in_order = torch.where(used, positions.long(), unused).sort(-1).values
    fits = (in_order >= 0) & ((in_order < tokens) | (in_order == unused))
    differ = (in_order[..., 1:] != in_order[..., :-1]) | (in_order[..., 1:] == unused)
    fits = fits.all() & (counts <= positions.shape[-1]).all()
    torch._assert_async(
        fits & differ.all(), f"positions must differ and lie in [0, {tokens}), and counts be at most their number")
    return Columns(in_order.contiguous(), counts.int().contiguous())
