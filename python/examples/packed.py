#!/usr/bin/env python3
"""Documents of different lengths in one row of tokens, forward and backward, beside each document alone.

    python/examples/packed.py      on a Hopper GPU where there is one, else on the CPU
"""

import torch
from torch.nn.functional import pad

from ringleader.kernels import Moba, documents_from_lengths, sparse_attention, sparse_attention_varlen

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
device, dtype, block = ("cuda", torch.bfloat16, 512) if hopper else ("cpu", torch.float32, 64)
torch.manual_seed(0)
lengths = torch.tensor([6, 0, 9, 17], device=device) * block  # of tokens; a multiple of the block has blocks as alone
cu_seqlens = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
tokens = int(cu_seqlens[-1])
q, k, v = (torch.randn(tokens, heads, 64, device=device, dtype=dtype, requires_grad=True) for heads in (8, 2, 2))

documents = documents_from_lengths(cu_seqlens, tokens)  # once a step, for all layers; cu_seqlens itself does as well
choice = Moba(block_size=block, topk_blocks=3, tile=64)
out = sparse_attention_varlen(q, k, v, documents, choice)
out.square().mean().backward()
for first, last in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:]):
    if first < last:
        alone = sparse_attention(*(x[first:last].transpose(0, 1).unsqueeze(0) for x in (q, k, v)), choice)
        error = (out[first:last] - alone[0].transpose(0, 1)).norm() / out[first:last].norm()
        print(f"tokens {first} to {last}: differ from alone by {error.item():.3f}; |dq| = {q.grad[first:last].norm().item():.2e}")
