#!/usr/bin/env python3
"""One layer's attention, densely and sparsely: how much each choice visits, and how near its output comes.

    python/examples/attention.py      on a Hopper GPU where there is one, else on the CPU
"""

import torch

from ringleader.kernels import (KeyGroups, Moba, SlidingWindow, VerticalSlash, XAttention, documents_from_lengths,
                                sparse_attention)

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
device, dtype, tokens = ("cuda", torch.bfloat16, 16384) if hopper else ("cpu", torch.float32, 2048)
torch.manual_seed(0)
q, k, v = (torch.randn(1, heads, tokens, 64, device=device, dtype=dtype, requires_grad=True) for heads in (8, 2, 2))
with torch.no_grad():  # some keys that every query looks for
    q += 0.5
    k[:, :, torch.randint(tokens, (16,))] += 3

documents = documents_from_lengths(torch.tensor([0, tokens // 3, tokens], device=device), tokens)
dense = sparse_attention(q, k, v, documents=documents)
for choice in (KeyGroups(density=0.2), SlidingWindow(tokens // 8), VerticalSlash(density=0.2),
               Moba(block_size=128, density=0.25), XAttention(density=0.25)):
    out, lse = sparse_attention(q, k, v, choice, documents=documents, return_lse=True)
    (dq,) = torch.autograd.grad(out.square().mean(), q)
    error = ((out - dense).norm() / dense.norm()).item()
    print(f"{type(choice).__name__:14} differs from dense by {error:.3f}; |dq| = {dq.norm().item():.2e}")
