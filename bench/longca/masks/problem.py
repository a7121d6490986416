"""Inputs of a length that masks/main.py measures on."""

import torch

from lengths import PROLONG_LIKE
from ringleader.kernels import documents_from_ids, key_intervals


class Problem:
    """A length's tensors, documents and masks."""

    def __init__(self, device, tokens, heads, kv_heads, head_dim, lengths=PROLONG_LIKE):
        generator = torch.Generator(device).manual_seed(0)
        self.device, self.tokens = device, tokens
        self.q, self.k, self.v = (
            torch.randn(1, tokens, h, head_dim, device=device, dtype=torch.bfloat16, generator=generator).transpose(1, 2)
            .requires_grad_() for h in (heads, kv_heads, kv_heads))
        self.d_out = torch.randn_like(self.q)
        begins = torch.zeros(1, tokens, dtype=torch.int64)
        begins[0, list(lengths.firsts(tokens))] = 1
        self.documents = documents_from_ids(begins.cumsum(1).to(device))
        # As MaskedSequence::MaskOf in ../problem.cc.
        self.window = self.block = min(1024, max(tokens // 4, 1))
        self.global_window, self.prefix = max(tokens // 12, 1), max(tokens // 3, 1)

    def intervals(self, name):
        of_documents = "documents" in name or name in ("shared_question", "causal_blockwise")
        return key_intervals(
            name, self.tokens, documents=self.documents if of_documents else None, prefix=self.prefix, block=self.block,
            window=self.global_window if name == "global_sliding" else self.window, device=self.device)

    def mask_mod(self, name):
        """FlexAttention's function of the same mask."""
        start, window, block = self.documents.starts[0], self.window, self.block
        prefix, first, last = self.prefix, self.global_window, start[-1]
        second = torch.where(start > 0, start, self.tokens).min()
        return {
            "full": lambda b, h, i, j: i >= 0,
            "causal": lambda b, h, i, j: j <= i,
            "full_window": lambda b, h, i, j: (i - j < window) & (j - i < window),
            "causal_window": lambda b, h, i, j: (j <= i) & (i - j < window),
            "full_documents": lambda b, h, i, j: start[i] == start[j],
            "causal_documents": lambda b, h, i, j: (start[i] == start[j]) & (j <= i),
            "shared_question": lambda b, h, i, j: (j <= i) & (
                (start[i] == start[j]) | (start[j] == 0) | ((start[i] == second) & (start[j] <= second))),
            "causal_blockwise": lambda b, h, i, j: (j <= i) & ((start[i] == start[j]) | (start[i] == last)),
            "global_sliding": lambda b, h, i, j: (i < first) | (j < first) | ((i - j < first) & (j - i < first)),
            "prefix_causal": lambda b, h, i, j: (j <= i) | (j < prefix),
            "prefix_documents": lambda b, h, i, j: (start[i] == start[j]) & ((j <= i) | (j < start[i] + prefix)),
            "block_causal_documents": lambda b, h, i, j: (start[i] == start[j]) & (
                (j - start[i]) // block <= (i - start[i]) // block),
        }[name]
