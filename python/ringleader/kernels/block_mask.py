"""FlexAttention's BlockMask as lists of tiles and, where it shows other than a causal mask would, intervals of keys. That
is found out by evaluating it once, which waits for the device."""

import weakref

import torch
from torch.overrides import TorchFunctionMode

from ringleader.kernels.blocks import lists_as_bool, tiles_from_lists
from ringleader.kernels.documents import as_documents
from ringleader.kernels.masks import KeyIntervals, key_intervals, rows_of_runs


def _shown_parts(block_mask, kept, mask_mod, tokens):
    """Of the blocks of `kept`, [batch, heads, rows, blocks], some at a time: b, h, q and kv, [blocks, 1 or q_block, 1 or
    kv_block], and what mask_mod shows of them. Waits for the device."""
    q_block, kv_block = block_mask.BLOCK_SIZE
    blocks = kept.nonzero()
    for part in blocks.split(512) if len(blocks) else ():  # split has a part of none, which mask_mod may not take
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
    """[(kept [batch, heads, rows, blocks], mask_mod or None for blocks that are shown whole)]. batch and heads are 1 where
    q's are all alike: where lists are, and mask_mod does not look at them. differ: sequences do beside the BlockMask"""
    q_block, kv_block = block_mask.BLOCK_SIZE
    sizes = -(-tokens // q_block), -(-tokens // kv_block), batch, heads
    mask_mod, device = block_mask.mask_mod, block_mask.kv_indices.device
    listed = [(lists_as_bool(block_mask.kv_num_blocks, block_mask.kv_indices, *sizes, of="the BlockMask's "), mask_mod)]
    if block_mask.full_kv_num_blocks is not None:
        listed.append((lists_as_bool(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, *sizes,
                              of="the BlockMask's full "), None))
    shape = [max(kept.shape[dimension] for kept, _ in listed) for dimension in (0, 1)]
    if shape[0] < batch and (differ or _looks_at(mask_mod, 0, device)):
        shape[0] = batch
    if shape[1] < heads and _looks_at(mask_mod, 1, device):
        shape[1] = heads
    return [(kept.expand(*shape, -1, -1), mask_mod) for kept, mask_mod in listed]


def _difference(block_mask, listed, wants, tokens):
    """The first pair that block_mask shows otherwise than wants(b, q, kv): (query, key, whether it is shown), or None."""
    for kept, mask_mod in listed:
        for b, _, q, kv, shown in _shown_parts(block_mask, kept, mask_mod, tokens):
            wrong = (shown != wants(b, q, kv)).nonzero()
            if len(wrong) > 0:
                t, i, j = wrong[0].tolist()
                return q[t, i, 0].item(), kv[t, 0, j].item(), bool(shown[t, i, j])
    return None


def _intervals(block_mask, parts, tokens):
    """parts: _listed's. -> [batch, tokens, 4] int32: intervals that show what the listed blocks show, taken from the first
    head that lists each of them. Raises where there are none."""
    q_block, kv_block = block_mask.BLOCK_SIZE
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
    try:
        rows = _intervals(block_mask, listed, tokens)
    except NotImplementedError as error:
        raise NotImplementedError(f"blocks: a BlockMask of which {error}") from error

    def in_intervals(b, q, kv):
        x, y, z, w = rows[b.clamp(max=rows.shape[0] - 1), q].unbind(-1)
        return ((x <= kv) & (kv < y)) | ((z <= kv) & (kv < w))

    difference = _difference(block_mask, listed, in_intervals, tokens)
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
