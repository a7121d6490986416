"""FlexAttention's BlockMask as lists of tiles and, where it shows other than a causal mask would, intervals of keys. That
is found out by evaluating it once, which waits for the device."""

import weakref
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ringleader.kernels.blocks import lists_as_bool, tiles_from_lists
from ringleader.kernels.documents import as_documents
from ringleader.kernels.masks import KeyIntervals, check_runs, key_intervals


class _Listed(NamedTuple):
    """Blocks that a BlockMask lists. batch and heads are 1 where q's are all alike: where lists are, and mask_mod does not
    look at them."""

    kept: torch.Tensor  # [batch, heads, rows, blocks] bool
    whole: torch.Tensor  # the same of those that are shown without asking mask_mod


def _shown_parts(block_mask, listed, blocks, tokens):
    """Of `blocks`, each a tensor of numbers (b, h, row, block), some at a time: b, h, q and kv, [blocks, 1 or q_block, 1 or
    kv_block], and what is shown of them. Waits for the device."""
    q_block, kv_block = block_mask.BLOCK_SIZE
    evaluate, device = block_mask.mask_mod, blocks[0].device
    for dimensions in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
        evaluate = torch.vmap(evaluate, in_dims=dimensions)
    # split has a part of none, which mask_mod may not take.
    for part in zip(*(x.split(512) for x in blocks)) if len(blocks[0]) > 0 else ():
        whole = listed.whole[part].view(-1, 1, 1)
        b, h, row, block = (x.view(-1, 1, 1) for x in part)
        q = (row * q_block + torch.arange(q_block, device=device).view(1, -1, 1)).clamp(max=tokens - 1)
        kv = (block * kv_block + torch.arange(kv_block, device=device).view(1, 1, -1)).clamp(max=tokens - 1)
        shown = whole.expand(-1, q_block, kv_block)
        if not whole.all():
            shown = shown | evaluate(b[:, 0, 0], h[:, 0, 0], q[:, :, 0], kv[:, 0]).bool()
        yield b, h, q, kv, shown


class _ValuesAlone(TorchFunctionMode):
    """What is made of a number's type and device, as and_masks does, does not depend on the number."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.new_ones, torch.Tensor.new_zeros, torch.Tensor.new_full):
            args = (torch.zeros((), dtype=args[0].dtype, device=args[0].device), *args[1:])
        return func(*args, **(kwargs or {}))


def _looks_at(mask_mod, argument, device):
    """Whether what mask_mod says depends on its argument of this place: 0 is b, 1 is h."""
    arguments = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)]
    arguments[argument] = arguments[argument].view(1)
    dimensions = tuple(0 if place == argument else None for place in range(4))
    try:
        with _ValuesAlone():
            torch.vmap(mask_mod, in_dims=dimensions, out_dims=None)(*arguments)
    except ValueError:  # of vmap, where the result has a part for each value of the argument
        return True
    return False


def _listed(block_mask, tokens, batch, heads, differ):
    """-> _Listed. differ: sequences do beside the BlockMask"""
    q_block, kv_block = block_mask.BLOCK_SIZE
    sizes = -(-tokens // q_block), -(-tokens // kv_block), batch, heads
    mask_mod, device = block_mask.mask_mod, block_mask.kv_indices.device
    kept = lists_as_bool(block_mask.kv_num_blocks, block_mask.kv_indices, *sizes, of="the BlockMask's ")
    whole = torch.zeros_like(kept)
    if block_mask.full_kv_num_blocks is not None:
        whole = lists_as_bool(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, *sizes, of="the BlockMask's full ")
    shape = [max(kept.shape[dimension], whole.shape[dimension]) for dimension in (0, 1)]
    if shape[0] < batch and (differ or _looks_at(mask_mod, 0, device)):
        shape[0] = batch
    if shape[1] < heads and _looks_at(mask_mod, 1, device):
        shape[1] = heads
    return _Listed((kept | whole).expand(*shape, -1, -1), whole.expand(*shape, -1, -1))


def _difference(block_mask, listed, wants, tokens):
    """The first pair that block_mask shows otherwise than wants(b, q, kv): (query, key, whether it is shown), or None."""
    for b, _, q, kv, shown in _shown_parts(block_mask, listed, listed.kept.nonzero().unbind(1), tokens):
        wrong = (shown != wants(b, q, kv)).nonzero()
        if len(wrong) > 0:
            t, i, j = wrong[0].tolist()
            return q[t, i, 0].item(), kv[t, 0, j].item(), bool(shown[t, i, j])
    return None


def _rows(block_mask, listed, tokens, by_head):
    """-> [batch, heads, tokens, 4] int32: intervals that show what the listed blocks show, where a query's keys lie in at most
    two runs, and how many of these there are, [batch, heads, tokens]. heads is 1 unless by_head; each block then is as the
    first head that lists it has it.

    Blocks come by rows, so that a query's keys ascend: a run of those that it sees begins where the key before is hidden,
    in this block or at the end of the row's last one, and ends likewise. Of two runs the first and the last bounds are known."""
    (q_block, kv_block), kept = block_mask.BLOCK_SIZE, listed.kept
    batch, heads, rows, _ = kept.shape
    if by_head:
        blocks = kept.nonzero().unbind(1)
    else:
        b, row, block, h = (kept & (kept.cumsum(1) == 1)).permute(0, 2, 3, 1).nonzero().unbind(1)
        blocks, heads = (b, h, row, block), 1
    shape, device = (batch * heads * rows, q_block), kept.device
    runs, last_end = (torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(2))
    first_begin, first_end = (torch.full(shape, tokens, dtype=torch.int32, device=device) for _ in range(2))
    last_begin = torch.zeros(shape, dtype=torch.int32, device=device)
    previous = None  # of the part before: its last block's row, keys of its last column, and where that ends
    for b, h, q, kv, shown in _shown_parts(block_mask, listed, blocks, tokens):
        row = ((b * heads + (h if by_head else 0)) * rows + q[:, :1] // q_block).flatten()
        begin = kv[:, :, :1].int()
        positions = begin + torch.arange(kv_block, dtype=torch.int32, device=device)
        visible = shown & (positions < tokens)
        ends = begin.flatten() + kv_block
        if previous is None:
            previous = row[:1] - 1, visible[:1, :, -1], ends[:1]
        row_before, edge, end_before = (torch.cat([x, y[:-1]]) for x, y in zip(previous, (row, visible[:, :, -1], ends)))
        edge = edge & (row_before == row).unsqueeze(1)
        before = torch.cat([edge.unsqueeze(2), visible[:, :, :-1]], 2)
        positions_after = torch.cat([end_before.view(-1, 1, 1), positions[:, :, 1:]], 2)
        begins, hidden = visible & ~before, before & ~visible
        of_query = row.unsqueeze(1).expand(-1, q_block)
        runs.scatter_add_(0, of_query, begins.sum(2, dtype=torch.int32))
        for bound, values, least in ((first_begin, torch.where(begins, positions, tokens), True),
                                     (first_end, torch.where(hidden, positions_after, tokens), True),
                                     (last_begin, torch.where(begins, positions, 0), False),
                                     (last_end, torch.where(visible, positions + 1, 0), False)):
            bound.scatter_reduce_(0, of_query, values.amin(2) if least else values.amax(2), "amin" if least else "amax")
        previous = row[-1:], visible[-1:, :, -1], ends[-1:]
    runs = runs.view(batch, heads, -1)[:, :, :tokens]
    bounds = (x.view(batch, heads, -1)[:, :, :tokens] for x in (first_begin, first_end, last_begin, last_end))
    first_begin, first_end, last_begin, last_end = bounds
    is_two = runs == 2
    end = torch.where(is_two, first_end, last_end)
    return torch.stack([torch.where(runs > 0, first_begin, 0), end, torch.where(is_two, last_begin, end), last_end], -1), runs


def _by_fewest_groups(rows):
    """rows: [batch, heads, tokens, 4] -> those of groups of heads that follow one another and are alike: [batch, groups, ...]"""
    for groups in range(1, rows.shape[1]):
        if rows.shape[1] % groups == 0:
            grouped = rows.unflatten(1, (groups, -1))
            if (grouped == grouped[:, :, :1]).all():
                return grouped[:, :, 0].contiguous()
    return rows


def _mask_of(block_mask, starts, tokens, batch, heads):
    """None where block_mask shows, of the blocks that it lists, what a causal mask does, within documents if there are
    any; else the KeyIntervals that show the same. Raises where there are none. Evaluates mask_mod on listed blocks, for each
    of q's sequences and heads if it looks at them, and waits for the device."""
    if starts is not None and (starts == starts[:1]).all():
        starts = starts[:1]
    listed = _listed(block_mask, tokens, batch, heads, differ=starts is not None and starts.shape[0] > 1)

    def causal(b, q, kv):
        wanted = kv <= q
        return wanted if starts is None else wanted & (kv >= starts[b.clamp(max=starts.shape[0] - 1), q])

    difference = _difference(block_mask, listed, causal, tokens)
    if difference is None:
        return None
    if starts is not None:
        query, key, shown = difference
        raise NotImplementedError(
            f"blocks: the BlockMask {'shows' if shown else 'hides'} key {key} to query {query}; beside documents it must be "
            "causal within them: leave documents out where its mask_mod has them")
    if _difference(block_mask, listed, lambda b, q, kv: kv >= 0, tokens) is None:
        return key_intervals("full", tokens, device=block_mask.kv_indices.device)
    rows, runs = _rows(block_mask, listed, tokens, by_head=False)
    alike = listed.kept.shape[1] == 1 or (
        bool((runs <= 2).all()) and _difference(block_mask, listed, _shows(rows[:, 0]), tokens) is None)
    if not alike:
        rows, runs = _rows(block_mask, listed, tokens, by_head=True)
    check_runs(runs, of="blocks: a BlockMask of which ")
    return KeyIntervals(rows[:, 0] if alike else _by_fewest_groups(rows))


def _shows(rows):
    """rows: [batch, tokens, 4] -> whether they show a key"""

    def shows(b, q, kv):
        x, y, z, w = rows[b.clamp(max=rows.shape[0] - 1), q].unbind(-1)
        return ((x <= kv) & (kv < y)) | ((z <= kv) & (kv < w))

    return shows


_converted = weakref.WeakKeyDictionary()  # BlockMask -> {(batch, heads): (documents' tensor, lists)}


def tiles_from_block_mask(block_mask, *, heads, batch=1, documents=None, check=True):
    """block_mask: FlexAttention's, of equally many queries and keys. What it lists is attended to: causally, within
    `documents` if there are any, or, where mask_mod says otherwise, in the intervals of keys that it shows, of which
    each query may have two, in each head others. That is found by evaluating it on the listed blocks, which waits for the device;
    check=False takes the caller's word that it is causal and does not wait."""
    tokens, keys = block_mask.seq_lengths
    if tokens != keys:
        raise ValueError(f"blocks is a BlockMask of {tokens} queries and {keys} keys; there must be equally many")
    mask = _mask_of(block_mask, as_documents(documents, batch, tokens), tokens, batch, heads) if check else None
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
