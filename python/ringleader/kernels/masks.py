"""Masks as at most two intervals of keys for each query: twelve by name, and any other. Made on the device of what they
are made from, without waiting for it. kernels/masks/masks.h has the same definitions."""

from typing import NamedTuple

import torch

from ringleader.kernels import checks
from ringleader.kernels.documents import as_documents, documents_from_ids

# name -> whether no query sees a key ahead of it
NAMES = {
    "full": False, "causal": True, "full_window": False, "causal_window": True, "full_documents": False,
    "causal_documents": True, "shared_question": True, "causal_blockwise": True, "global_sliding": False,
    "prefix_causal": False, "prefix_documents": False, "block_causal_documents": False,
}


class KeyIntervals(NamedTuple):
    """Query i of sequence b attends to keys [begin, end) and [second_begin, second_end) of rows[b, i], which ascend, or of
    rows[b, h, i] where masks differ by head: h is one of `groups` of heads that follow one another, whose number divides
    q's. Bounds that do not ascend are refused on the CPU and raised to the one before them on GPUs."""

    rows: torch.Tensor  # [batch, tokens, 4] or [batch, groups, tokens, 4] int32
    causal: bool = False  # no query sees a key ahead of it: lists of tiles need not go on beyond the diagonal
    full: bool = False  # every query sees every key: `rows` need not be read

    def check(self, batch, tokens):
        rows = self.rows
        if (rows.dtype != torch.int32 or rows.dim() not in (3, 4) or rows.shape[-2:] != (tokens, 4)
                or rows.shape[0] not in (1, batch)):
            raise ValueError(f"mask has rows of {rows.dtype} {list(rows.shape)}; with this q they must be int32 "
                             f"[{batch}, {tokens}, 4], or [{batch}, groups, {tokens}, 4] where masks differ by head")

    def of(self, batch, tokens):
        self.check(batch, tokens)
        return self.rows.expand(batch, *self.rows.shape[1:]).contiguous()

    def within(self, documents):
        """The same where a query's document is, and nothing elsewhere."""
        self.check(*documents.starts.shape)
        return self._cut(documents.starts, _ends(documents.starts))

    def within_window(self, window):
        """The same where keys are less than `window` tokens away."""
        checks.positive(window=window)
        tokens = self.rows.shape[-2]
        window = min(window, tokens)  # longer ones are the same, and sums of positions are of int32
        query = torch.arange(tokens, device=self.rows.device, dtype=torch.int32).unsqueeze(0)
        return self._cut((query + 1 - window).clamp(min=0), (query + window).clamp(max=tokens))

    def _cut(self, begins, ends):
        """Of each query's intervals what lies in [begins, ends), [batch or 1, tokens]."""
        begins, ends = (x.view(len(x), *[1] * (self.rows.dim() - 3), -1, 1) for x in (begins, ends))
        return KeyIntervals(torch.minimum(torch.maximum(self.rows, begins), ends), self.causal)


def _ends(starts):
    """[batch, tokens]: where each token's document ends."""
    tokens = starts.shape[1]
    positions = torch.arange(tokens, device=starts.device, dtype=torch.int32)
    firsts = torch.where(starts == positions, positions, tokens)
    following = torch.nn.functional.pad(firsts[:, 1:], (0, 1), value=tokens)
    return following.flip(1).cummin(1).values.flip(1)


def _cut_prefix(prefix, tokens):
    """An integer, or a tensor of them -> what is the same in [0, tokens], with which sums of positions are of int32."""
    return prefix.long().clamp(0, tokens) if isinstance(prefix, torch.Tensor) else min(max(prefix, 0), tokens)


def key_intervals(name, tokens, *, documents=None, window=1024, prefix=0, block=1024, device=None):
    """The mask of that name for sequences of `tokens`. What query i sees:

    full, causal: every key; keys up to i
    full_window, causal_window: keys less than `window` away, both ways or up to i
    full_documents, causal_documents: its document, all of it or up to i
    shared_question: the first document (the question) and its own (an answer) up to i; the second document, the first
        answer, goes on from the question
    causal_blockwise: its document up to i; in the last document everything up to i
    global_sliding: keys less than `window` away and the first `window` keys; everything, if it is one of the first
    prefix_causal, prefix_documents: the first `prefix` keys, of the sequence or its document, and keys up to i
    block_causal_documents: its document up to the end of the block of i; blocks of `block` tokens count from its first

    documents: ids [batch, tokens] or [tokens], or Documents. prefix: an integer, or a tensor of them, [batch, 1] or, a document's for
    each of its tokens, [batch, tokens]."""
    if name not in NAMES:
        raise ValueError(f"name is {name!r}; masks are {', '.join(NAMES)}")
    checks.positive(tokens=tokens, window=window, block=block)
    window, block = min(window, tokens), min(block, tokens)  # longer ones are the same, and sums of positions are of int32
    of_documents = name.endswith("documents") or name in ("shared_question", "causal_blockwise")
    if of_documents and documents is None:
        raise ValueError(f"{name} needs documents: ids [batch, tokens], or Documents")
    if not of_documents and documents is not None:
        raise ValueError(f"{name} does not look at documents; leave them out, or take a mask of documents")
    check = checks.integers if isinstance(prefix, torch.Tensor) else checks.integer
    check("[batch, 1] or [batch, tokens]", prefix=prefix)
    starts = None
    if documents is not None:
        if isinstance(documents, torch.Tensor):
            documents = documents_from_ids(documents)
        starts = documents.starts if hasattr(documents, "starts") else as_documents(documents, 1, tokens)
        if starts.shape[1] != tokens:
            raise ValueError(f"documents are of {starts.shape[1]} tokens; the mask is of {tokens}")
        device = starts.device
    elif isinstance(prefix, torch.Tensor):
        device = prefix.device
    query = torch.arange(tokens, device=device, dtype=torch.int32).unsqueeze(0)
    after = query + 1
    zero, all_keys = torch.zeros_like(query), torch.full_like(query, tokens)
    window_begin, window_end = (after - window).clamp(min=0), (query + window).clamp(max=tokens)
    second = None
    if name == "full":
        first = zero, all_keys
    elif name == "causal":
        first = zero, after
    elif name == "full_window":
        first = window_begin, window_end
    elif name == "causal_window":
        first = window_begin, after
    elif name == "full_documents":
        first = starts, _ends(starts)
    elif name == "causal_documents":
        first = starts, after
    elif name == "shared_question":
        first, second = (zero, torch.minimum(_ends(starts)[:, :1], after)), (starts, after)
    elif name == "causal_blockwise":
        first = torch.where(starts == starts[:, -1:], 0, starts), after
    elif name == "global_sliding":
        sees_all = query < window
        first = zero, torch.where(sees_all, tokens, window)
        second = torch.where(sees_all, tokens, window_begin), torch.where(sees_all, tokens, window_end)
    elif name == "prefix_causal":
        first = zero, torch.maximum(after, zero + _cut_prefix(prefix, tokens))
    elif name == "prefix_documents":
        first = starts, torch.minimum(torch.maximum(after, starts + _cut_prefix(prefix, tokens)), _ends(starts))
    else:
        end = starts + ((query - starts) // block + 1) * block
        first = starts, torch.minimum(end, _ends(starts))
    begin, end = torch.broadcast_tensors(*first)
    if second is None:
        second = end, end
    # Where the second interval meets the first, they are one.
    meet = second[0] <= end
    end = torch.where(meet, torch.maximum(end, second[1]), end)
    bounds = begin, end, torch.where(meet, end, second[0]), torch.where(meet, end, second[1])
    return KeyIntervals(torch.stack(torch.broadcast_tensors(*bounds), -1).int(), NAMES[name], name == "full")


def intervals_of_mask(visible):
    """visible: [batch, tokens, tokens] bool, or [batch, groups, tokens, tokens] by groups of heads, which keys (last) each
    query sees. For tests and odd masks of short sequences; waits for the device."""
    positions = torch.arange(visible.shape[-1], device=visible.device)
    before = torch.nn.functional.pad(visible, (1, 0))[..., :-1]
    following = torch.nn.functional.pad(visible, (0, 1))[..., 1:]
    begins, ends = visible & ~before, visible & ~following
    runs = begins.sum(-1)
    check_runs(runs)
    place = begins.int().cumsum(-1)  # 1 in the first run and after it
    rows = torch.zeros(*runs.shape, 4, dtype=torch.int64, device=visible.device)
    for run in (1, 2):
        begin, end = ((edge & (place == run)).long() for edge in (begins, ends))
        exists = runs >= run
        rows[..., 2 * run - 2] = torch.where(exists, (begin * positions).sum(-1), rows[..., 1])
        rows[..., 2 * run - 1] = torch.where(exists, (end * (positions + 1)).sum(-1), rows[..., 2 * run - 2])
    return KeyIntervals(rows.int(), bool((rows[..., 3] <= positions + 1).all()))


def check_runs(runs, of=""):
    """runs: [batch, queries] or [batch, heads, queries], in how many the keys lie that a query sees. Raises where these are
    more than two. of: what precedes the mask in messages"""
    if (runs > 2).any():
        at = (runs > 2).nonzero()[0]
        of_head = f" of head {at[1].item()}" if len(at) == 3 and runs.shape[1] > 1 else ""
        raise NotImplementedError(
            f"{of}the mask shows query {at[-1].item()}{of_head} keys in {runs[tuple(at)].item()} runs; masks of at most two "
            "intervals of keys for each query are computed: use FlexAttention for others")
