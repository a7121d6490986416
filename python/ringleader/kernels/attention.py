"""sparse_attention: the function, and what it takes as blocks."""

import torch
from torch.nn.attention.flex_attention import BlockMask

from ringleader.kernels import checks
from ringleader.kernels.block_mask import tiles_of
from ringleader.kernels.blocks import (CAUSAL, FULL, UNMASKED_CSR, Columns, Diagonals, SlidingWindow, TileLists,
                                       tiles_from_lists)
from ringleader.kernels.documents import as_documents
from ringleader.kernels.masks import KeyIntervals, key_intervals
from ringleader.kernels.operators import ops

_LISTED = "None, a BlockMask, (counts, indices), a SlidingWindow, what the functions of ringleader.kernels.blocks return"
_FORMS = f"{_LISTED}, or a choice such as VerticalSlash()"


# An overload by name is found sooner than by its arguments. A logarithm that nobody asks for becomes no Python object.
_attention, _attention_output = ops.attention.default, ops.attention_output.default


def _chosen(q, k, blocks, documents, scale):
    """What a choice returns, which is then taken as if it had been passed itself."""
    chosen = blocks(q, k, documents=documents, scale=scale)
    if chosen is None or isinstance(chosen, (BlockMask, tuple)) or hasattr(chosen, "visit"):
        return chosen
    raise TypeError(f"blocks, a {type(blocks).__name__}, returned a {type(chosen).__name__}; it may return {_LISTED}")


def _visit(q, blocks, columns):
    """-> (pattern, lists, other arguments) of the operator"""
    if columns is not None:
        if not isinstance(columns, Columns):
            raise TypeError(f"columns is a {type(columns).__name__}; make it with selected_columns")
        if not isinstance(blocks, Diagonals) or blocks.columns is not None:
            raise NotImplementedError("columns go with blocks=block_diagonals(...) that has none of its own; with other "
                                      "blocks list the columns' tiles")
        blocks = blocks._replace(columns=columns)
    if blocks is None:
        return CAUSAL, [], {}
    if isinstance(blocks, Diagonals):
        return blocks.visit(q.size(2))
    if hasattr(blocks, "visit"):
        return blocks.visit()
    if isinstance(blocks, tuple) and len(blocks) == 2 and all(isinstance(x, torch.Tensor) for x in blocks):
        return tiles_from_lists(*blocks, tokens=q.shape[2], heads=q.shape[1], batch=q.shape[0]).visit()
    raise TypeError(f"blocks is a {type(blocks).__name__}; it may be {_FORMS}")


def _lists(q, blocks, causal):
    """What can be visited under a mask other than causal -> TileLists or None"""
    if blocks is None or isinstance(blocks, TileLists):
        return blocks
    if isinstance(blocks, Diagonals):
        return blocks.lists(q.shape[2])
    if isinstance(blocks, tuple) and len(blocks) == 2 and all(isinstance(x, torch.Tensor) for x in blocks):
        return tiles_from_lists(*blocks, tokens=q.shape[2], heads=q.shape[1], batch=q.shape[0], causal=causal)
    raise NotImplementedError("mask goes with lists of tiles (tiles_from_lists, tiles_from_mask, tiles_from_edges), "
                              f"block_diagonals, a SlidingWindow or blocks=None; blocks is a {type(blocks).__name__}")


def _check_mask(q, mask, documents):
    """`mask` is one other than causal, and goes with `documents`."""
    if isinstance(mask, str):
        if mask != "full":
            raise NotImplementedError(f"mask is {mask!r}; it may be 'causal', 'full' or what key_intervals returns, which "
                                      "knows more names")
    elif not isinstance(mask, KeyIntervals):
        raise TypeError(f"mask is a {type(mask).__name__}; it may be 'causal', 'full' or what key_intervals returns")
    elif documents is not None:
        raise ValueError("documents beside a mask of intervals; make the mask of them: key_intervals(..., documents=...)")
    else:
        mask.check(q.shape[0], q.shape[2])


def _intervals(q, mask, documents):
    if isinstance(mask, KeyIntervals):
        return mask
    return key_intervals("full" if documents is None else "full_documents", q.shape[2], documents=documents, device=q.device)


def _visit_masked(q, blocks, documents, columns, mask):
    """-> (pattern, lists, other arguments) of the operator, for a mask other than causal"""
    batch, _, tokens, _ = q.shape
    if columns is not None or isinstance(blocks, Diagonals) and blocks.columns is not None:
        raise NotImplementedError("columns go with mask='causal'")
    is_full, is_causal = (documents is None, False) if isinstance(mask, str) else (mask.full, mask.causal)
    lists = _lists(q, blocks, is_causal)
    if lists is not None and lists.mask is not None:
        raise ValueError("mask beside blocks that come from a BlockMask with a mask of its own; leave one of them out")
    if lists is not None and lists.causal and not is_causal:
        raise ValueError("blocks lists no tiles ahead of their queries, which this mask may show; make it with causal=False")
    pattern, listed, more = (FULL, [], {}) if lists is None else lists.visit()
    if is_full and lists is None:
        return pattern, listed, more
    if is_full and tokens % lists.tile == 0:  # without comparisons
        return UNMASKED_CSR, listed, more
    return pattern, listed, {**more, "intervals": _intervals(q, mask, documents).of(batch, tokens)}


def _attend_by_head(q, k, v, blocks, mask, **arguments):
    """Under a mask that differs by head: heads that share one are computed as a sequence of their own. Keys are copied for
    those of a group of query heads that do not."""
    batch, heads, tokens, _ = q.shape
    kv_heads, groups, rows = k.shape[1], mask.rows.shape[1], mask.of(batch, tokens)
    if heads % kv_heads != 0 or heads % groups != 0:
        raise ValueError(f"q has {heads} heads, k {kv_heads} and mask rows for {groups}; the first must be a multiple of the "
                         "others")
    if kv_heads % groups != 0:
        if groups % kv_heads != 0:
            rows, groups = rows.repeat_interleave(heads // groups, 1), heads
        k, v = (x.repeat_interleave(groups // kv_heads, 1) for x in (k, v))

    def apart(x):
        return x.unflatten(1, (groups, -1)).flatten(0, 1)

    lists = _lists(q, blocks, mask.causal)
    if lists is not None:
        lists = lists._replace(row_offsets=apart(lists.row_offsets), column_offsets=apart(lists.column_offsets))
    result = sparse_attention(apart(q), apart(k), apart(v), lists, mask=KeyIntervals(rows.flatten(0, 1), mask.causal),
                              **arguments)
    out, *lse = result if arguments["return_lse"] else (result,)
    out = out.unflatten(0, (batch, groups)).permute(0, 3, 1, 2, 4).flatten(2, 3).contiguous().transpose(1, 2)
    return (out, lse[0].unflatten(0, (batch, groups)).flatten(1, 2)) if lse else out


def sparse_attention(q, k, v, blocks=None, *, documents=None, columns=None, mask="causal", scale=None,
                     deterministic=None, return_lse=False):
    """Attention to the tiles that `blocks` names, causal or under another mask, forward and backward.

    q: [batch, heads, tokens, head_dim]; k, v: [batch, kv_heads, tokens, head_dim], heads a multiple of kv_heads, any
    strides (those of F.scaled_dot_product_attention and FlexAttention). On GPUs bfloat16 and a head_dim of 64 or 128;
    on the CPU also float32, and any head_dim up to 256. Under torch.autocast they are cast to its type.

    blocks: None (all tiles), FlexAttention's BlockMask, (counts, indices) lists of blocks of 128 tokens as
        tiles_from_lists takes them, a SlidingWindow, block_diagonals(...), tiles_from_*(...), or a choice that is made
        from q and k: KeyGroups(), VerticalSlash(), Moba(), XAttention() or what they returned, or a function as they are,
        called with (q, k, documents=..., scale=...), that returns any of the other forms.
    documents: ids [batch, tokens], or Documents; a query sees its own document alone.
    columns: selected_columns(...) beside block_diagonals(...): keys that all later queries of a head see.
    mask: "causal"; "full", within documents if there are any; or key_intervals(...): any mask that is at most two
        intervals of keys for each query. Beside masks other than causal, blocks are None, lists of tiles, block_diagonals
        without columns, or a SlidingWindow, of which a query then sees what is near to both sides.
    scale: of logits; 1 / sqrt(head_dim) by default.
    deterministic: gradients with the same bits every time; by default as torch.use_deterministic_algorithms says.
    return_lse: also return the natural logarithm of each row's sum, [batch, heads, tokens] float32, differentiable.

    Returns [batch, heads, tokens, head_dim] like q, zeros for a query that sees nothing (then the logarithm is
    -infinity). Enqueues on the current stream without waiting for the device (but for the check of a BlockMask that
    it meets for the first time), and can be compiled and captured into CUDA graphs.
    """
    if not isinstance(q, torch.Tensor) or q.dim() != 4:
        raise ValueError(f"q is {checks.described(q)}; it must be [batch, heads, tokens, head_dim]")
    if k is None or v is None:
        raise ValueError(f"{'k' if k is None else 'v'} is None; it must be [batch, kv_heads, tokens, head_dim]")
    if isinstance(mask, str) and mask == "causal":
        if callable(blocks) and columns is None and not isinstance(blocks, type) and not hasattr(blocks, "visit"):
            blocks = _chosen(q, k, blocks, documents, scale)
        if isinstance(blocks, BlockMask):
            blocks = tiles_of(blocks, q.shape[1], q.shape[0], documents)
        if isinstance(blocks, TileLists) and blocks.mask is not None:
            return sparse_attention(q, k, v, blocks._replace(mask=None), documents=documents, columns=columns,
                                    mask=blocks.mask, scale=scale, deterministic=deterministic, return_lse=return_lse)
        pattern, lists, more = _visit(q, blocks, columns)
        if documents is not None:
            more["documents"] = as_documents(documents, q.shape[0], q.shape[2])
    else:
        _check_mask(q, mask, documents)
        if isinstance(blocks, SlidingWindow):
            blocks.check()
            mask, blocks, documents = _intervals(q, mask, documents).within_window(blocks.tokens), None, None
        if isinstance(mask, KeyIntervals) and mask.rows.dim() == 4:
            return _attend_by_head(q, k, v, blocks, mask, documents=documents, columns=columns, scale=scale,
                                   deterministic=deterministic, return_lse=return_lse)
        pattern, lists, more = _visit_masked(q, blocks, documents, columns, mask)  # documents are in the intervals
    if scale is not None:
        more["scale"] = scale
    if deterministic is not None:
        more["deterministic"] = deterministic
    return (_attention if return_lse else _attention_output)(q, k, v, pattern, lists, **more)
