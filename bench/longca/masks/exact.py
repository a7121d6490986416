"""Attention by its definition in rows all over a sequence, which main.py compares every kernel with. What a query sees
Problem.mask_mod says, not ringleader.kernels."""

from typing import NamedTuple

import torch

from choices import TILE

MOST_ROWS = 256  # of a result, in each head
MOST_PAIRS = 1 << 27  # of rows, keys and heads at once: 512 MiB in float32
ALL_KV_HEADS = 32768  # tokens of the longest sequence whose dK and dV are compared in all KV heads


class Rows(NamedTuple):
    """Rows of out or of a gradient in some heads."""

    heads: torch.Tensor  # [heads]
    positions: torch.Tensor  # [rows]
    expected: torch.Tensor  # [heads, rows, head_dim]
    sizes: torch.Tensor  # [heads, rows]: the norm that a row would have if the terms of its sum were independent

    def error(self, found):
        """found: [1, heads, tokens, head_dim]. How far the row is off that is off most, of its size; NaN where one is.
        Terms of a gradient's row can cancel each other, but their rounding does not: hence not of its own norm."""
        rows = found[0][self.heads[:, None], self.positions[None]]
        return ((rows.to(self.expected.dtype) - self.expected).norm(dim=-1) / self.sizes).max().item()


def positions_of(tokens, device):
    """The rows that are looked at: as many in every part of the sequence, the first and the last among them."""
    return torch.linspace(0, tokens - 1, min(tokens, MOST_ROWS), dtype=torch.float64, device=device).round().long()


def _blocks(p, name, chosen, rows, kv_heads, dtype):
    """Yields, for some of `rows` and a KV head at a time: where they are in `rows`, the KV head, its query heads, a
    span of keys with all that the rows see, and weights and gradients of scaled logits, [query heads, rows, keys]."""
    q, k, v, d_out = (x.detach()[0] for x in (p.q, p.k, p.v, p.d_out))
    positions, shows = torch.arange(p.tokens, device=q.device), p.mask_mod(name)
    group = q.shape[0] // k.shape[0]
    step = max(1, MOST_PAIRS // (group * p.tokens))
    for first in range(0, len(rows), step):
        at = slice(first, first + step)
        here = rows[at]
        shown = shows(0, 0, here[:, None], positions).expand(len(here), p.tokens)
        seen = shown.any(0).nonzero()
        keys = slice(seen[0].item(), seen[-1].item() + 1)
        for kv_head in kv_heads:
            heads = slice(kv_head * group, (kv_head + 1) * group)
            visible = shown[:, keys]
            if chosen is not None:
                visible = visible & chosen[heads][:, here // TILE][:, :, positions[keys] // TILE]
            logits = q[heads, here].to(dtype) @ k[kv_head, keys].to(dtype).T * q.shape[2] ** -0.5
            weights = torch.softmax(logits.masked_fill_(~visible, -torch.inf), -1)
            d_weights = d_out[heads, here].to(dtype) @ v[kv_head, keys].to(dtype).T
            yield at, kv_head, heads, keys, weights, weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))


def _squares(x):
    return x.detach()[0].double().square().sum(-1)


def _of_queries(p, name, chosen):
    """Rows of out and dQ, in float64."""
    k, v = p.k.detach()[0], p.v.detach()[0]
    heads, head_dim = p.q.shape[1], p.q.shape[3]
    rows = positions_of(p.tokens, k.device)
    out, dq = torch.zeros(2, heads, len(rows), head_dim, dtype=torch.float64, device=k.device)
    out_sizes, dq_sizes = torch.zeros(2, heads, len(rows), dtype=torch.float64, device=k.device)
    of_k, of_v, of_d_out = map(_squares, (p.k, p.v, p.d_out))
    for at, kv_head, group, keys, weights, d_logits in _blocks(p, name, chosen, rows, range(len(k)), torch.float64):
        out[group, at] = weights @ v[kv_head, keys].double()
        dq[group, at] = d_logits @ k[kv_head, keys].double() * head_dim**-0.5
        squares = weights.square()
        out_sizes[group, at] = (squares @ of_v[kv_head, keys]).sqrt()
        dq_sizes[group, at] = (squares @ (of_v * of_k)[kv_head, keys] * of_d_out[group][:, rows[at]]).sqrt() / head_dim
    every = torch.arange(heads, device=k.device)
    return Rows(every, rows, out, out_sizes), Rows(every, rows, dq, dq_sizes)


def _of_keys(p, name, chosen):
    """Rows of dK and dV: sums over all queries that see the key, in float32 by blocks of them."""
    q, d_out = p.q.detach()[0], p.d_out.detach()[0]
    kv_heads, head_dim = p.k.shape[1], p.k.shape[3]
    compared = range(kv_heads) if p.tokens <= ALL_KV_HEADS else sorted({0, kv_heads - 1})
    rows = positions_of(p.tokens, q.device)
    dk, dv = torch.zeros(2, kv_heads, len(rows), head_dim, dtype=torch.float64, device=q.device)
    of_dk, of_dv = torch.zeros(2, kv_heads, len(rows), dtype=torch.float64, device=q.device)
    of_q, of_v, of_d_out = map(_squares, (p.q, p.v, p.d_out))
    every = torch.arange(p.tokens, device=q.device)
    for at, kv_head, group, keys, weights, d_logits in _blocks(p, name, chosen, every, compared, torch.float32):
        seen = ((rows >= keys.start) & (rows < keys.stop)).nonzero()[:, 0]
        weights, d_logits = (x[:, :, rows[seen] - keys.start] for x in (weights, d_logits))
        dv[kv_head, seen] += torch.einsum("hqk,hqd->kd", weights, d_out[group, at].float())
        dk[kv_head, seen] += torch.einsum("hqk,hqd->kd", d_logits, q[group, at].float()) * head_dim**-0.5
        squares = weights.double().square()
        of_dv[kv_head, seen] += torch.einsum("hqk,hq->k", squares, of_d_out[group, at])
        of_dk[kv_head, seen] += torch.einsum("hqk,hq->k", squares, (of_d_out * of_q)[group, at])
    dk_sizes = (of_dk * of_v[:, rows]).sqrt() / head_dim
    heads = torch.tensor(list(compared), device=q.device)
    return Rows(heads, rows, dk[heads], dk_sizes[heads]), Rows(heads, rows, dv[heads], of_dv[heads].sqrt())


def rows_of(p, name, chosen):
    """chosen: as Choice.draw returns it. -> {direction: Rows of each of its results}"""
    out, dq = _of_queries(p, name, chosen)
    return {"forward": (out,), "backward": (dq, *_of_keys(p, name, chosen))}
