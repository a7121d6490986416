"""Masks as slices: MagiAttention's flex-flash-attention takes a mask as rectangles of queries and keys, each seen whole or
with its upper right, its lower left or both cut off along a diagonal."""

import torch

# By how far a run of queries moves the begin and the end of its keys from one query to the next: MagiAttention's type.
_TYPES = {(0, 0): 0, (0, 1): 1, (1, 0): 2, (1, 1): 3}


def _runs_of(begins, ends):
    """Runs of queries that see keys, one after the other, whose begins and ends both stay or both move on by one key a query
    throughout: (first query, last query, type). Of several ways to cut, the one that makes each run as long as it goes."""
    moves = torch.stack([begins.diff(), ends.diff()])
    is_run = ((moves == 0) | (moves == 1)).all(0) & (begins < ends)[1:] & (begins < ends)[:-1]
    kinds, counts = torch.where(is_run, moves[0] * 2 + moves[1], -1).unique_consecutive(return_counts=True)
    following, at = 0, 0  # the next query of no run; the query at which moves of a kind begin
    for kind, count in zip(kinds.tolist(), counts.tolist()):
        at += count
        if kind < 0:
            yield from ((query, query, 0) for query in range(following, at))
            following = max(following, at)
        elif following <= at:
            yield following, at, _TYPES[divmod(kind, 2)] if following < at else 0
            following = at + 1
    yield from ((query, query, 0) for query in range(following, len(begins)))


def slices_of(rows):
    """The slices of KeyIntervals' `rows` [tokens, 4] (int32): (queries [slices, 2], keys [slices, 2], types [slices]), int32 on
    the rows' device, ranges [begin, end)."""
    begins, ends, second_begins, second_ends = rows.cpu().unbind(1)
    meet = ends == second_begins
    ends, second_ends = torch.where(meet, second_ends, ends), torch.where(meet, second_begins, second_ends)
    queries, keys, types = [], [], []
    for begins, ends in ((begins, ends), (second_begins, second_ends)):
        for first, last, kind in _runs_of(begins, ends):
            if begins[first] < ends[first]:
                queries.append((first, last + 1))
                keys.append((begins[first].item(), ends[last].item()))
                types.append(kind)
    return tuple(torch.tensor(found, dtype=torch.int32, device=rows.device) for found in (queries, keys, types))


def are_apart(ranges):
    """Whether none of the ranges [slices, 2] begins before all that stand before it have ended."""
    return bool((ranges[1:, 0] >= ranges[:-1, 1].cummax(0).values).all())
