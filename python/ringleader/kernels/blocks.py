"""What attention visits, as the kernels take it. All is causal, and all but the check of a BlockMask is made on the
device, without waiting for it.

A tile is `tile` x `tile` tokens, 64 or 128. Tensors have a part for each sequence and query head. The named tuples are
made by the functions here and by choices.py; the values in tuples made by hand are not checked on GPUs.
"""

import weakref
from typing import NamedTuple, Optional

import torch

from ringleader.kernels.operators import ops

# ringleader::kernels::TilePattern
CAUSAL, WINDOW, TOEPLITZ, CSR = 1, 2, 3, 4


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

    def visit(self):
        return CSR, list(self[:4]), self.tile, 0


class QueryBlocks(NamedTuple):
    """Blocks that each query chose for itself, and the tiles in which one did (MoBA)."""

    lists: TileLists
    queries: torch.Tensor  # [batch, heads, blocks, words] int32, a bit for each query
    block_size: int

    def visit(self):
        return CSR, [*self.lists[:4], self.queries], self.lists.tile, self.block_size


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


def tiles_from_mask(mask, *, tokens, tile=128):
    """mask: [batch, heads, tiles, tiles] bool, which key tiles (last) each query tile attends to, causally."""
    _check_tile(tile)
    tiles = (tokens + tile - 1) // tile
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[2:] != (tiles, tiles):
        raise ValueError(
            f"mask is {mask.dtype} {list(mask.shape)}; for {tokens} tokens it must be bool [batch, heads, {tiles}, {tiles}]")
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


def tiles_from_lists(counts, indices, *, tokens, heads, batch=1, block_size=128, full_counts=None, full_indices=None):
    """counts: [batch, heads, rows] and indices: [batch, heads, rows, most], integers: of row A (block_size queries) the
    first counts[..., A] of indices[..., A, :] are the key blocks that it attends to, causally, in any order. batch and
    heads may be 1, or missing, for all alike. block_size: of queries and keys alike, or (queries, keys). The lists of
    full blocks, if there are any, are attended to as well."""
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
    chosen = _pack(rows, 32, torch.int32).expand(batch, heads, -1, -1).contiguous()
    return lists_from_bits(chosen, tokens, tile, kv_block, min(blocks, sum(
        x.shape[-1] for x in (indices, full_indices) if x is not None)))


def _check_mask_mod(block_mask, starts, tokens):
    """Raises unless block_mask shows, of the blocks that it lists, what a causal mask does: within documents, if there
    are any. Evaluates mask_mod on listed blocks and waits for the device."""
    q_block, kv_block = block_mask.BLOCK_SIZE
    blocks = -(-tokens // kv_block)
    partial = _dense(block_mask.kv_num_blocks, block_mask.kv_indices, blocks)
    listed = [(partial, block_mask.mask_mod)]
    if block_mask.full_kv_num_blocks is not None:
        listed.append((_dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, blocks), None))
    device = partial.device
    for kept, mask_mod in listed:
        for part in kept.nonzero().split(512):
            b, h, row, block = (x.view(-1, 1, 1) for x in part.unbind(1))
            q = (row * q_block + torch.arange(q_block, device=device).view(1, -1, 1)).clamp(max=tokens - 1)
            kv = (block * kv_block + torch.arange(kv_block, device=device).view(1, 1, -1)).clamp(max=tokens - 1)
            wanted = kv <= q
            if starts is not None:
                wanted = wanted & (kv >= starts[b.clamp(max=starts.shape[0] - 1), q])
            shown = torch.ones_like(wanted)
            if mask_mod is not None:
                evaluate = mask_mod
                for dimensions in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
                    evaluate = torch.vmap(evaluate, in_dims=dimensions)
                shown = evaluate(b[:, 0, 0], h[:, 0, 0], q.expand(len(part), -1, 1)[:, :, 0],
                                 kv.expand(len(part), 1, -1)[:, 0])
            wrong = (shown.bool() != wanted).nonzero()
            if len(wrong) > 0:
                t, i, j = wrong[0].tolist()
                verb = "shows" if shown[t, i, j] else "hides"
                raise NotImplementedError(
                    f"blocks: the BlockMask {verb} key {kv[t, 0, j].item()} to query {q[t, i, 0].item()}; causal masks "
                    "alone are computed, within documents where the argument documents has them: make the BlockMask "
                    "from such a mask_mod, or use FlexAttention")


_converted = weakref.WeakKeyDictionary()  # BlockMask -> [(batch, heads, starts, lists)]


def tiles_from_block_mask(block_mask, *, heads, batch=1, documents=None, check=True):
    """block_mask: FlexAttention's, of equally many queries and keys. What it lists is attended to, causally and, if
    there are `documents`, within them. That mask_mod says the same is checked by evaluating it on the listed blocks,
    which waits for the device; check=False takes the caller's word and does not wait."""
    from ringleader.kernels.documents import as_documents

    tokens, keys = block_mask.seq_lengths
    if tokens != keys:
        raise ValueError(f"blocks is a BlockMask of {tokens} queries and {keys} keys; there must be equally many")
    if check:
        _check_mask_mod(block_mask, as_documents(documents, batch, tokens), tokens)
    return tiles_from_lists(
        block_mask.kv_num_blocks, block_mask.kv_indices, tokens=tokens, heads=heads, batch=batch,
        block_size=tuple(block_mask.BLOCK_SIZE), full_counts=block_mask.full_kv_num_blocks,
        full_indices=block_mask.full_kv_indices)


def tiles_of(block_mask, heads, batch, documents):
    """tiles_from_block_mask, once for each BlockMask and documents."""
    if torch.compiler.is_compiling():
        raise RuntimeError("blocks is a BlockMask, whose mask_mod cannot be checked inside torch.compile; pass what "
                           "tiles_from_block_mask returns for it outside")
    known = _converted.setdefault(block_mask, [])
    for of_batch, of_heads, of_documents, lists in known:
        if (of_batch, of_heads) == (batch, heads) and of_documents is documents:
            return lists
    lists = tiles_from_block_mask(block_mask, heads=heads, batch=batch, documents=documents)
    known.append((batch, heads, documents, lists))
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
