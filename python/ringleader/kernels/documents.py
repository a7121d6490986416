"""Documents packed into sequences: a query attends to keys of its own document alone. Made on the device of what they
are made from, without waiting for it."""

from typing import NamedTuple

import torch

from ringleader.kernels import checks


class Documents(NamedTuple):
    """For each token the position of its document's first. Made by the functions below, which cannot make wrong ones;
    the same one serves all layers of a step."""

    starts: torch.Tensor  # [batch, tokens] int32


def _from_firsts(is_first):
    """is_first: [batch, tokens] bool; a sequence's first token always is one."""
    positions = torch.arange(is_first.shape[1], device=is_first.device, dtype=torch.int32)
    return Documents(torch.where(is_first, positions, 0).cummax(1).values)


def _batched(name, x):
    if not isinstance(x, torch.Tensor) or x.dim() not in (1, 2) or x.is_floating_point() or x.is_complex():
        raise ValueError(f"{name} is {checks.described(x)}; it must be integers, [tokens] or [batch, tokens]")
    return x.unsqueeze(0) if x.dim() == 1 else x


def documents_from_ids(ids):
    """ids: [batch, tokens] or [tokens], any integers: a document begins where they change."""
    ids = _batched("ids", ids)
    return _from_firsts(torch.cat([torch.ones_like(ids[:, :1], dtype=torch.bool), ids[:, 1:] != ids[:, :-1]], 1))


def documents_from_position_ids(position_ids):
    """position_ids: [batch, tokens] or [tokens]: a document begins where they do not go on by one."""
    ids = _batched("position_ids", position_ids)
    return _from_firsts(torch.cat([torch.ones_like(ids[:, :1], dtype=torch.bool), ids[:, 1:] != ids[:, :-1] + 1], 1))


def documents_from_lengths(cu_seqlens, tokens):
    """cu_seqlens: [documents + 1], ascending from 0 to `tokens`, as varlen functions take them: of one sequence."""
    return documents_of_sums("cu_seqlens", cu_seqlens, tokens)


def documents_of_sums(name, sums, tokens):
    """documents_from_lengths of an argument that callers know by that name"""
    checks.positive(tokens=tokens)
    checks.integers("[documents + 1]", **{name: sums})
    if sums.dim() != 1 or len(sums) < 2:
        raise ValueError(f"{name} is {list(sums.shape)}; it must be [documents + 1]")
    ascends = (sums[1:] >= sums[:-1]).all() & (sums[0] == 0) & (sums[-1] == tokens)
    torch._assert_async(ascends, f"{name} must be sums of lengths, which ascend from 0 to tokens: "
                        "F.pad(lengths.cumsum(0), (1, 0))")
    is_first = torch.zeros(tokens + 1, dtype=torch.bool, device=sums.device)
    return _from_firsts(is_first.index_fill(0, sums.long(), True)[:tokens].unsqueeze(0))


def as_documents(documents, batch, tokens):
    """What callers pass as `documents`: None, Documents or ids. -> starts or None"""
    if documents is None:
        return None
    if isinstance(documents, torch.Tensor):
        documents = documents_from_ids(documents)
    if not isinstance(documents, Documents):
        raise TypeError(
            f"documents is a {type(documents).__name__}; pass ids [batch, tokens], or what documents_from_lengths or "
            "documents_from_position_ids return")
    starts = documents.starts
    if starts.dim() != 2 or starts.shape[1] != tokens or starts.shape[0] not in (1, batch):
        raise ValueError(f"documents are of {list(starts.shape)} tokens; with this q they must be [{batch}, {tokens}]")
    return starts if starts.shape[0] == batch else starts.expand(batch, tokens).contiguous()
