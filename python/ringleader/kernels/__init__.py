"""Sparse attention for PyTorch: the kernels that Ringleader's trainers run. docs/kernels_python.md is its page."""

from ringleader.kernels.attention import sparse_attention
from ringleader.kernels.block_mask import tiles_from_block_mask
from ringleader.kernels.blocks import (
    ChosenGroups,
    Columns,
    Diagonals,
    QueryBlocks,
    SlidingWindow,
    TileLists,
    block_diagonals,
    selected_columns,
    tiles_from_edges,
    tiles_from_lists,
    tiles_from_mask,
)
from ringleader.kernels.choices import KeyGroups, Moba, VerticalSlash, XAttention
from ringleader.kernels.documents import (
    Documents,
    documents_from_ids,
    documents_from_lengths,
    documents_from_position_ids,
)
from ringleader.kernels.masks import KeyIntervals, intervals_of_mask, key_intervals
from ringleader.kernels.varlen import sparse_attention_varlen

__all__ = [
    "ChosenGroups",
    "Columns",
    "Diagonals",
    "Documents",
    "KeyGroups",
    "KeyIntervals",
    "Moba",
    "QueryBlocks",
    "SlidingWindow",
    "TileLists",
    "VerticalSlash",
    "XAttention",
    "block_diagonals",
    "documents_from_ids",
    "documents_from_lengths",
    "documents_from_position_ids",
    "intervals_of_mask",
    "key_intervals",
    "selected_columns",
    "sparse_attention",
    "sparse_attention_varlen",
    "tiles_from_block_mask",
    "tiles_from_edges",
    "tiles_from_lists",
    "tiles_from_mask",
]
