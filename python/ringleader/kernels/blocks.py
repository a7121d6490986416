"""What attention visits, as the kernels take it: made on the device, without waiting for it (but by tiles_from_edges).

A tile is `tile` x `tile` tokens, 64 or 128. Tensors have a part for each sequence and query head. The named tuples are
made by the functions here, in block_mask.py and in choices.py. Values in tuples made by hand are checked on the CPU, where
attention meets them, and not on GPUs.
"""

from typing import NamedTuple, Optional

import torch

from ringleader.kernels import checks
from ringleader.kernels.masks import KeyIntervals
from ringleader.kernels.operators import ops

# ringleader::kernels::TilePattern
FULL, CAUSAL, WINDOW, TOEPLITZ, CSR, UNMASKED_CSR, KEY_GROUPS = range(7)


def _options(tile=128, **others):
    """The operator's other arguments, of which each costs a call a share of a microsecond: those that are not its defaults."""
    return others if tile == 128 else {"tile": tile, **others}


class SlidingWindow(NamedTuple):
    """The last `tokens` tokens, a query's own included."""

    tokens: int
    tile: int = 128

    def check(self):
        """Also where a mask takes the window's place, which has no tiles."""
        if isinstance(self.tokens, (bool, float)) or self.tokens < 1:
            raise ValueError(f"tokens of SlidingWindow is {self.tokens}; it must be a positive integer")
        _check_tile(self.tile)

    def visit(self):
        """-> (pattern, lists, other arguments) of the operator, as every visit() here returns them"""
        self.check()
        return WINDOW, [], _options(self.tile, size=self.tokens)


class Columns(NamedTuple):
    """Keys that all later queries of a head see (verticals)."""

    positions: torch.Tensor  # [batch, heads, max_columns] int64, ascending; unused slots at the end hold 2^63 - 1
    counts: torch.Tensor  # [batch, heads] int32
    tokens: Optional[int] = None  # of the sequences that they were selected from, where known


class Diagonals(NamedTuple):
    """Block diagonals (slashes), and columns beside them."""

    bits: torch.Tensor  # [batch, heads, words] int64: bit d % 64 of word d / 64: block A sees block A - d
    columns: Optional[Columns] = None
    tile: int = 128
    visited: Optional[torch.Tensor] = None  # [batch] int64: tiles of the diagonals over all heads, where known
    blocks: Optional[int] = None  # of the sequences that they were made for, where known

    def visit(self, tokens=None):
        """tokens: q's. Raises where these are diagonals, or columns, of sequences of another length."""
        bits, columns, tile, _, _ = self
        if tokens is not None:
            self._check(tokens)
        if columns is None:
            return TOEPLITZ, [bits], _options(tile)
        if tokens is not None and columns.tokens is not None and columns.tokens != tokens:
            raise ValueError(f"columns were selected from {columns.tokens} tokens; q has {tokens}")
        return TOEPLITZ, [bits, columns.positions, columns.counts], _options(tile)

    def lists(self, tokens):
        """The tiles of the diagonals -> TileLists, none of which lies ahead of its queries. tokens: q's"""
        self._check(tokens)
        tiles = -(-tokens // self.tile)
        if self.bits.shape[-1] * 64 < tiles:
            raise ValueError(f"blocks.bits has {self.bits.shape[-1]} words of 64 diagonals; q's {tokens} tokens have {tiles}")
        apart = torch.arange(tiles, device=self.bits.device)
        kept = (self.bits.unsqueeze(-1) >> torch.arange(64, device=self.bits.device) & 1).flatten(-2).bool()
        apart = apart.unsqueeze(1) - apart
        chosen = _pack(kept[..., apart.clamp(min=0)] & (apart >= 0), 32, torch.int32)
        return lists_from_bits(chosen, tokens, self.tile, self.tile)._replace(causal=False)

    def _check(self, tokens):
        if self.blocks is not None and self.blocks != -(-tokens // self.tile):
            raise ValueError(f"blocks has {self.blocks} diagonals of {self.tile} x {self.tile} tokens; q's {tokens} tokens "
                             f"have {-(-tokens // self.tile)}")


class TileLists(NamedTuple):
    """Lists of tiles in both directions, each ascending, offsets into the lists of the whole batch."""

    row_offsets: torch.Tensor  # [batch, heads, tiles + 1] int32
    columns: torch.Tensor  # [capacity] int32: key tiles by query tile
    column_offsets: torch.Tensor  # [batch, heads, tiles + 1] int32
    rows: torch.Tensor  # [capacity] int32: query tiles by key tile
    tile: int = 128
    causal: bool = True  # tiles ahead of all of a row's queries were left out
    mask: Optional[KeyIntervals] = None  # of what listed tiles show, where that is not causal

    def visit(self):
        return CSR, list(self[:4]), _options(self.tile)


class QueryBlocks(NamedTuple):
    """Blocks that each query chose for itself, and the tiles in which one did (MoBA). A query chose at most `topk_blocks`
    or, above 0, a share `density` of those that it sees, its own counted: for so many GPUs make room to gather the queries of
    each block. They then read `queries` alone, of blocks before a query's own, and a head that has more of them attends to
    queries' own blocks only. With neither, as after `_replace(topk_blocks=0, density=0.0)`, tiles are visited whole."""

    lists: TileLists
    queries: torch.Tensor  # [batch, heads, blocks, words] int32, a bit for each query
    block_size: int
    topk_blocks: int = 0
    density: float = 0.0

    def visit(self):
        return CSR, [*self.lists[:4], self.queries], _options(
            self.lists.tile, size=self.block_size, topk_blocks=self.topk_blocks, density=self.density)


class ChosenGroups(NamedTuple):
    """Groups of 8 keys that each tile of 64 queries chose of those before it, beside its own tile (KeyGroups), which made
    this of q and k of some length, with the share `density`. Attention makes lists of them, 4 bytes each, in either direction."""

    diagonals: torch.Tensor  # [batch, heads, words] int64, as Diagonals.bits: each tile's own
    bits: torch.Tensor  # [batch, heads, words] int32: bit g % 32 of word rows[t] + g / 32: tile t keeps group g
    rows: torch.Tensor  # [tiles + 1] int64
    density: float

    def visit(self):
        return KEY_GROUPS, list(self[:3]), _options(64, density=self.density)


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
    if chosen.shape[0] == 0:  # the operator wants a sequence
        offsets, listed = chosen.new_empty(0, chosen.shape[1], tiles + 1), chosen.new_empty(0)
        return TileLists(offsets, listed, offsets, listed, tile)
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


def _is_bool(x, dimensions):
    return isinstance(x, torch.Tensor) and x.dtype == torch.bool and x.dim() == dimensions


def tiles_from_mask(mask, *, tokens, tile=128, causal=True):
    """mask: [batch, heads, tiles, tiles] bool, which key tiles (last) each query tile attends to. causal: leave out tiles
    ahead of their queries, which masks that are not causal may show."""
    _check_tile(tile)
    checks.positive(tokens=tokens)
    tiles = (tokens + tile - 1) // tile
    if not _is_bool(mask, 4) or mask.shape[2:] != (tiles, tiles):
        raise ValueError(
            f"mask is {checks.described(mask)}; for {tokens} tokens it must be bool [batch, heads, {tiles}, {tiles}]")
    if not causal:
        return lists_of_all_tiles(mask, tile)
    return lists_from_bits(_pack(mask, 32, torch.int32), tokens, tile, tile)


def lists_as_bool(counts, indices, rows, blocks, batch, heads, of=""):
    """Lists of blocks as [batch or 1, heads or 1, rows, blocks] bool. of: what precedes their names in messages"""
    of_rows, of_blocks = f"{of}counts", f"{of}indices"
    for name, x in ((of_rows, counts), (of_blocks, indices)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is {checks.described(x)}; it must be a tensor of integers")
    if not 1 <= counts.dim() <= 3 or counts.shape != indices.shape[:-1]:
        raise ValueError(f"{of_rows} is {list(counts.shape)} and {of_blocks} {list(indices.shape)}; indices must have one "
                         "dimension more than counts: [batch, heads, rows] and [batch, heads, rows, most]")
    if counts.shape[-1] != rows:
        raise ValueError(f"{of_rows} has {counts.shape[-1]} rows of blocks; with these tokens there must be {rows}")
    for name, size, wanted in zip(("heads", "batch"), counts.shape[-2::-1], (heads, batch)):
        if size not in (1, wanted):
            raise ValueError(f"{of_rows} has {size} for {name}; it must be 1 or q's {wanted}")
    checks.integers("[batch, heads, rows] and [batch, heads, rows, most]", **{of_rows: counts, of_blocks: indices})
    counts, indices, most = counts.long(), indices.long(), indices.shape[-1]
    checks.in_range(counts, most, of_rows, f"[0, {most}], as many as {of_blocks} has")
    listed = torch.arange(most, device=indices.device) < counts.unsqueeze(-1)
    checks.in_range(torch.where(listed, indices, 0), blocks - 1, f"{of_blocks} of listed blocks",
                    f"[0, {blocks}), the blocks of keys")
    mask = torch.zeros(*counts.shape, blocks + 1, dtype=torch.bool, device=indices.device)
    kept = mask.scatter_(-1, torch.where(listed, indices, blocks), True)[..., :blocks]
    return kept.view(*[1] * (3 - counts.dim()), *kept.shape)


def _blocks_of(block_size):
    """-> tokens of a block's queries and of its keys"""
    sizes = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 and size % 64 == 0 for size in sizes):
        raise ValueError(f"block_size is {block_size}; queries' and keys' must be multiples of 64")
    return sizes


def tiles_from_lists(counts, indices, *, tokens, heads, batch=1, block_size=128, full_counts=None, full_indices=None,
                     causal=True):
    """counts: [batch, heads, rows] and indices: [batch, heads, rows, most], integers: of row A (block_size queries) the
    first counts[..., A] of indices[..., A, :] are the key blocks that it attends to, in any order. batch and heads may
    be 1, or missing, for all alike. block_size: of queries and keys alike, or (queries, keys). The lists of full
    blocks, if there are any, are attended to as well. causal: as in tiles_from_mask."""
    q_block, kv_block = _blocks_of(block_size)
    checks.positive(tokens=tokens)
    if (full_counts is None) != (full_indices is None):
        raise ValueError(f"full_counts is {checks.described(full_counts)} and full_indices is "
                         f"{checks.described(full_indices)}; they go together")
    tile = 128 if q_block % 128 == 0 and kv_block % 128 == 0 else 64
    blocks, tiles = -(-tokens // kv_block), -(-tokens // tile)
    sizes = -(-tokens // q_block), blocks, batch, heads
    kept = lists_as_bool(counts, indices, *sizes)
    if full_counts is not None:
        kept = kept | lists_as_bool(full_counts, full_indices, *sizes, of="full_")
    rows = kept.repeat_interleave(q_block // tile, 2)[:, :, :tiles]
    if not causal:
        all_tiles = rows.repeat_interleave(kv_block // tile, 3)[..., :tiles]
        return lists_of_all_tiles(all_tiles.expand(batch, heads, -1, -1).contiguous(), tile)
    chosen = _pack(rows, 32, torch.int32).expand(batch, heads, -1, -1).contiguous()
    return lists_from_bits(chosen, tokens, tile, kv_block, min(blocks, sum(
        x.shape[-1] for x in (indices, full_indices) if x is not None)))


def tiles_from_edges(kept, query_edges, key_edges, *, tokens, causal=True):
    """Blocks of different sizes. kept: [batch, heads, rows, blocks] bool; query_edges and key_edges: the rows' and blocks'
    first tokens, ascending from 0, multiples of 64 in host memory (lists), which are copied to the device: it is waited for."""
    checks.positive(tokens=tokens)
    if not _is_bool(kept, 4):
        raise ValueError(f"kept is {checks.described(kept)}; it must be bool [batch, heads, rows, blocks]")
    tile = 128 if all(edge % 128 == 0 for edge in (*query_edges, *key_edges)) else 64
    numbers = []
    for name, edges, blocks in (("query_edges", query_edges, kept.shape[2]), ("key_edges", key_edges, kept.shape[3])):
        lengths = [b - a for a, b in zip(edges, [*edges[1:], tokens])]
        if not 0 < len(edges) == blocks or edges[0] != 0 or any(e % 64 for e in edges) or any(n < 1 for n in lengths):
            raise ValueError(f"{name} is {list(edges)}; it must hold {max(blocks, 1)} multiples of 64 that ascend from 0 to "
                             f"below {tokens}, the tokens")
        tiles = torch.tensor([-(-n // tile) for n in lengths], device=kept.device)
        numbers.append(torch.arange(blocks, device=kept.device).repeat_interleave(
            tiles, output_size=-(-tokens // tile)))
    return tiles_from_mask(kept[:, :, numbers[0]][..., numbers[1]].contiguous(), tokens=tokens, tile=tile, causal=causal)


def block_diagonals(kept, *, columns=None, tile=128):
    """kept: [batch, heads, blocks] bool: whether a block attends to the one that lies so many before it. The main
    diagonal, 0, always is kept."""
    _check_tile(tile)
    if not _is_bool(kept, 3) or kept.shape[2] == 0:
        raise ValueError(f"kept is {checks.described(kept)}; it must be bool [batch, heads, blocks]")
    main = torch.arange(kept.shape[-1], device=kept.device) == 0
    return Diagonals(_pack(kept | main, 64, torch.int64), columns, tile, blocks=kept.shape[2])


def selected_columns(positions, counts, *, tokens):
    """positions: [batch, heads, most] integers, in any order; the first counts[batch, heads] count. They must differ
    and lie in the sequence, of `tokens` as q has them, which the device checks when it comes to them."""
    checks.positive(tokens=tokens)
    checks.integers("[batch, heads, most] and [batch, heads]", positions=positions, counts=counts)
    if positions.dim() != 3 or counts.shape != positions.shape[:2] or counts.device != positions.device:
        raise ValueError(f"positions is {list(positions.shape)} on {positions.device} and counts {list(counts.shape)} on "
                         f"{counts.device}; they must be [batch, heads, most] and [batch, heads] on one device")
    positions, counts, most = positions.long(), counts.long(), positions.shape[-1]
    checks.in_range(counts, most, "counts", f"[0, {most}], as many as positions has")
    used = torch.arange(most, device=positions.device) < counts.unsqueeze(-1)
    fits = (positions >= 0) & (positions < tokens) | ~used
    unused = torch.iinfo(torch.int64).max
    in_order = torch.where(used, positions, unused).sort(-1).values
    differ = (in_order[..., 1:] != in_order[..., :-1]) | (in_order[..., 1:] == unused)
    torch._assert_async(fits.all() & differ.all(), f"positions must differ and lie in [0, {tokens})")
    return Columns(in_order.contiguous(), counts.int().contiguous(), tokens)
