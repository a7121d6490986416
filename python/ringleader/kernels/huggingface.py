"""attn_implementation="ringleader_sparse" for models of Hugging Face's transformers, in training and prefill."""

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from ringleader.kernels.attention import sparse_attention
from ringleader.kernels.documents import Documents, documents_from_ids

NAME = "ringleader_sparse"


def _parts(mask_function):
    """The functions that transformers' and_masks joined."""
    if mask_function.__qualname__ != "and_masks.<locals>.and_mask":
        return [mask_function]
    return [part for joined in mask_function.__closure__[0].cell_contents for part in _parts(joined)]


def _check_holes(attention_mask, ids):
    """Text with padding in its middle would fall apart into documents where others see across it. Asserted on the device,
    since nobody waits for it here."""
    kept = attention_mask != 0
    places = torch.arange(kept.shape[1], device=kept.device)
    starts = 0 if ids is None else documents_from_ids(ids.long()).starts
    last_kept = torch.where(kept, places, -1).cummax(1).values
    goes_on = kept[:, 1:] & ~kept[:, :-1] & (last_kept[:, :-1] >= (starts if ids is None else starts[:, 1:]))
    torch._assert_async(~goes_on.any(), f"{NAME} takes attention_mask with padding before or after a text, not in its middle")


def _documents_of_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=causal_mask_function,
                       attention_mask=None, **_):
    """What transformers passes to each layer as attention_mask: None for causal attention, or the starts of documents,
    which packed sequences are, and runs of padding."""
    if q_length != kv_length:
        raise NotImplementedError(
            f"{NAME} takes whole sequences, not {q_length} queries and {kv_length} keys; to generate with a key-value "
            "cache, call model.set_attn_implementation('sdpa') first")
    ids = None
    for part in _parts(mask_function):
        if part is causal_mask_function:
            continue
        if part.__qualname__ != "packed_sequence_mask_function.<locals>.inner_mask":
            raise NotImplementedError(f"{NAME} computes causal masks, with or without packed documents; this model asks "
                                      f"for {part.__qualname__}: choose another attn_implementation for it")
        ids = part.__closure__[0].cell_contents
    if attention_mask is not None:
        _check_holes(attention_mask, ids)
        ids = attention_mask if ids is None else ids * 2 + attention_mask
    if ids is None:
        return None
    return documents_from_ids(ids.long()).starts.expand(batch_size, -1)


def register(blocks, name=NAME, dense_layers=()):
    """Makes attn_implementation=name attend to `blocks` (what sparse_attention takes), but densely in `dense_layers`.
    Models that are loaded already take what was registered last."""

    def forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, is_causal=None, **arguments):
        if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            raise NotImplementedError(f"{name} computes causal attention; {type(module).__name__} asks for attention in "
                                      "both directions: choose another attn_implementation for it")
        for argument in ("sliding_window", "softcap", "s_aux", "position_bias"):
            if arguments.get(argument) is not None:
                raise NotImplementedError(f"{name} has no {argument}; {type(module).__name__} asks for it: choose "
                                          "another attn_implementation for this model")
        if attention_mask is None and arguments.get("cu_seq_lens_q") is not None:
            raise NotImplementedError(f"{name} tells packed documents by position_ids, not by cu_seq_lens_q; pass them to the "
                                      "model")
        if dropout > 0:
            raise NotImplementedError(f"{name} has no dropout; set config.attention_dropout = 0")
        if attention_mask is not None and attention_mask.dim() != 2:
            raise NotImplementedError(f"{name} takes attention_mask as [batch, tokens] of the model's inputs, not as a "
                                      f"mask of {list(attention_mask.shape)}")
        chosen = None if getattr(module, "layer_idx", None) in dense_layers else blocks
        documents = None if attention_mask is None else Documents(attention_mask)
        out = sparse_attention(query, key, value, chosen, documents=documents, scale=scaling)
        return out.transpose(1, 2), None

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, _documents_of_mask)
