"""What queries attend to, chosen from q and k by the kernels that choose it in Ringleader's trainers. A choice is called
with q and k, [batch, heads, tokens, head_dim] and [batch, kv_heads, tokens, head_dim], or passed to sparse_attention as
`blocks`. Nothing is differentiated, and nothing waits for the device."""

from dataclasses import dataclass

import torch

from ringleader.kernels import checks
from ringleader.kernels.blocks import ChosenGroups, Columns, Diagonals, QueryBlocks, lists_from_bits
from ringleader.kernels.documents import as_documents
from ringleader.kernels.operators import autocast, ops


def _inputs(q, k, documents, scale):
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            raise ValueError(f"{name} is {checks.described(x)}; it must be [batch, heads, tokens, head_dim]")
    q, k = autocast(q, k)
    starts = as_documents(documents, q.shape[0], q.shape[2])
    return q.detach(), k.detach(), starts, q.shape[3] ** -0.5 if scale is None else scale


@dataclass(frozen=True)
class VerticalSlash:
    """Columns and block diagonals that hold the most attention of a few queries (MTraining, arXiv 2510.18830, Algorithm
    1): the heaviest until they hold a share of it (`column_mass`, `diagonal_mass`), at most so many, or at most so many
    that a head visits a share of the causal tiles (`density`, if that is not 0; masses of 1 then keep the whole share). The first
    `sink_tokens` columns, the main diagonal and the `local_blocks` next to it are always kept. The queries lie all
    over the sequence (`spread`) or are its last ones (`end`, which documents and padding are refused with: the last
    queries of a sequence are those of its last document alone)."""

    estimate_queries: int = 64
    estimate_at: str = "spread"
    sink_tokens: int = 64
    local_blocks: int = 1
    max_columns: int = 4096
    column_mass: float = 0.9
    diagonal_mass: float = 0.9
    max_diagonals: int = 256
    density: float = 0.0
    tile: int = 128

    def __call__(self, q, k, *, documents=None, scale=None):
        q, k, starts, scale = _inputs(q, k, documents, scale)
        batch, heads, tokens, _ = q.shape
        checks.positive(estimate_queries=self.estimate_queries, max_columns=self.max_columns)
        count = min(self.estimate_queries, tokens)
        if self.estimate_at == "end":
            if starts is not None:
                raise ValueError("estimate_at is 'end' beside documents: the sequence's last queries are those of its last "
                                 "document, or padding, and would choose for all; it must be 'spread'")
            positions = torch.arange(tokens - count, tokens, device=q.device)
        elif self.estimate_at == "spread":
            positions = ops.spread_positions(q, count)
        else:
            raise ValueError(f"estimate_at is {self.estimate_at!r}; it must be 'end' or 'spread'")
        columns = round(0.1 * self.density * tokens) if self.density > 0 else self.max_columns
        max_columns, tiles = min(max(columns, self.sink_tokens, 1), tokens), -(-tokens // self.tile)
        if batch == 0:  # the operator wants a sequence
            return Diagonals(q.new_empty(0, heads, -(-tiles // 64), dtype=torch.int64),
                             Columns(q.new_empty(0, heads, max_columns, dtype=torch.int64),
                                     q.new_empty(0, heads, dtype=torch.int32), tokens),
                             self.tile, q.new_empty(0, dtype=torch.int64), tiles)
        bits, columns, counts, visited = ops.choose_vertical_slash(
            q, k, positions, None if starts is None else starts[:, positions].long(), self.tile, scale,
            self.column_mass, self.diagonal_mass, max_columns, self.max_diagonals, self.density,
            min(self.sink_tokens, max_columns), self.local_blocks)
        return Diagonals(bits, Columns(columns, counts, tokens), self.tile, visited, tiles)


@dataclass(frozen=True)
class Moba:
    """Each query keeps its own block of keys and the earlier ones whose mean key it scores highest (MoBA, arXiv
    2502.13189): `topk_blocks` with its own, or a share (`density`) of those that it sees. At most 640 blocks. GPUs gather
    the queries of each block, in up to 4 GiB or what one head needs, where they choose at most 80 % of what lies before them."""

    block_size: int = 1024
    topk_blocks: int = 8
    density: float = 0.0
    tile: int = 128

    def __call__(self, q, k, *, documents=None, scale=None):
        q, k, starts, _ = _inputs(q, k, documents, scale)
        chosen, queries = ops.choose_moba(q, k, starts, self.tile, self.block_size, self.topk_blocks, self.density)
        return QueryBlocks(lists_from_bits(chosen, q.shape[2], self.tile, self.block_size), queries, self.block_size,
                           self.topk_blocks, self.density)


@dataclass(frozen=True)
class KeyGroups:
    """Each tile of 64 queries sees its own tile and the groups of 8 keys before it that hold the largest logits of one of
    its queries, less that query's largest: what one query looks for is found (docs/patterns.md, `key_groups`, the default of
    Ringleader's trainers, whose `density` follows the length where none is named). Tiles keep more with the square root of
    how far they are into their document, and so many that a sequence visits a share `density` of its causal pairs. On GPUs
    gradients have other bits every time: `deterministic` is refused there in backward."""

    density: float = 0.2

    def __call__(self, q, k, *, documents=None, scale=None):
        q, k, starts, scale = _inputs(q, k, documents, scale)
        return ChosenGroups(*ops.choose_key_groups(q, k, starts, scale, self.density), self.density)


@dataclass(frozen=True)
class XAttention:
    """Each tile of queries keeps the key tiles that hold `threshold` of the sums over antidiagonals of `stride` tokens
    (XAttention, arXiv 2503.16428), at most a share (`density`) of those that it sees, if that is not 0, and always its
    own and the first."""

    stride: int = 16
    threshold: float = 0.9
    density: float = 0.0
    tile: int = 128

    def __call__(self, q, k, *, documents=None, scale=None):
        q, k, starts, scale = _inputs(q, k, documents, scale)
        tokens = q.shape[2]
        chosen = ops.choose_xattention(q, k, starts, self.tile, self.stride, scale, self.threshold, self.density)
        tiles = (tokens + self.tile - 1) // self.tile
        kept = max(2, int(self.density * tiles)) if self.density > 0 else tiles
        return lists_from_bits(chosen, tokens, self.tile, self.tile, min(kept, tiles))
