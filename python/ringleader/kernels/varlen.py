"""sparse_attention_varlen: sequences that are packed one after another, as FlashAttention's varlen functions take them."""

import torch

from ringleader.kernels import checks
from ringleader.kernels.attention import sparse_attention
from ringleader.kernels.documents import Documents, documents_from_lengths
from ringleader.kernels.masks import KeyIntervals


def _documents(q, cu_seqlens):
    if isinstance(cu_seqlens, Documents):
        if cu_seqlens.starts.shape != (1, q.shape[0]):
            raise ValueError(f"cu_seqlens are documents of {list(cu_seqlens.starts.shape)} tokens; with this q they must be "
                             f"[1, {q.shape[0]}]")
        return cu_seqlens
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dtype != torch.int32:
        raise ValueError(f"cu_seqlens is {checks.described(cu_seqlens)}; it must be int32 [sequences + 1], which "
                         "cu_seqlens.to(torch.int32) makes of other integers, or what documents_from_lengths returns")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device} and q on {q.device}; move it there, once a step: "
                         "cu_seqlens.to(q.device)")
    return documents_from_lengths(cu_seqlens, q.shape[0])


def sparse_attention_varlen(q, k, v, cu_seqlens, blocks=None, *, columns=None, mask="causal", scale=None,
                            deterministic=None, return_lse=False):
    """sparse_attention of sequences that lie one after another, of which each sees itself alone.

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], tokens of all sequences, any strides.
    cu_seqlens: [sequences + 1] int32 on q's device, as flash_attn_varlen_func takes it for queries and keys alike: 0, and
        where each sequence ends, the last at `tokens`. Sequences may be empty. Or documents_from_lengths(cu_seqlens,
        tokens), made once a step for all layers: a BlockMask in `blocks` is evaluated once for each of these.
    blocks, columns, mask and the others: as sparse_attention takes them for one sequence of `tokens`, and within each of
        the packed ones. Tiles, blocks and diagonals count from the first token of all, not from a sequence's first;
        intervals of keys end where a sequence does.

    Returns [tokens, heads, head_dim], dense; with return_lse also the logarithms, [heads, tokens] float32.

    Type, shape and device of cu_seqlens are checked on the host. Its values are refused at once on the CPU; on GPUs nobody
    waits for them, and an assertion on the device ends the process's use of the GPU where they do not ascend from 0 to
    `tokens`. Nobody looks at those of Documents that were made by hand.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor) or x.dim() != 3:
            heads = "heads" if name == "q" else "kv_heads"
            raise ValueError(f"{name} is {checks.described(x)}; it must be [tokens, {heads}, head_dim]: sequences of a "
                             "batch go to sparse_attention")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has {x.shape[0]} tokens and q {q.shape[0]}; sequences have as many keys as queries")
    documents = _documents(q, cu_seqlens)
    if isinstance(mask, KeyIntervals):
        mask, documents = mask.within(documents), None
    result = sparse_attention(*(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)), blocks, documents=documents,
                              columns=columns, mask=mask, scale=scale, deterministic=deterministic, return_lse=return_lse)
    if not return_lse:
        return result[0].transpose(0, 1)
    out, lse = result
    return out[0].transpose(0, 1), lse[0]
