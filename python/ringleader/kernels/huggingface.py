"""attn_implementation="ringleader_sparse" for models of Hugging Face's transformers, in training and prefill."""

import functools
import warnings
import weakref

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from ringleader.kernels import checks
from ringleader.kernels.attention import sparse_attention
from ringleader.kernels.documents import Documents, documents_from_ids, documents_from_position_ids, documents_of_sums

NAME = "ringleader_sparse"
# What else than masks tells packed documents apart, as models hand it on to their layers.
_TOLD_BY = ("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")
# What models ask for beside causal attention. The last two are keys that they chose themselves.
_LACKING = ("sliding_window", "softcap", "s_aux", "position_bias", "block_indices", "indices")
_COMPUTES_ITSELF = (f"this model computes attention with masks itself and does not call {NAME}, whose masks are for it alone: "
                    "choose another attn_implementation for it")


class _CausalMask:
    """What models hand on to their layers as attention_mask. Not a tensor, nor None, so that a model that computes attention
    itself fails: it would take None for leave to see what lies ahead."""

    def __init__(self, starts=None, packed=False):
        self.starts = starts  # of documents and runs of padding, [batch, tokens], or None
        self.packed = packed  # starts are of documents that position_ids tell apart, too

    def __getattr__(self, _):
        raise AttributeError(_COMPUTES_ITSELF)

    @classmethod
    def __torch_function__(cls, *_):
        raise NotImplementedError(_COMPUTES_ITSELF)

    def _refuse(self, *_):
        raise NotImplementedError(_COMPUTES_ITSELF)

    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __rand__ = __invert__ = _refuse
    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __bool__ = _refuse
    __hash__ = object.__hash__


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
    """What transformers passes to each layer as attention_mask."""
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
    packed = ids is not None
    if attention_mask is not None:
        _check_holes(attention_mask, ids)
        ids = attention_mask if ids is None else ids * 2 + attention_mask
    if ids is None:
        return _CausalMask()
    return _CausalMask(documents_from_ids(ids.long()).starts.expand(batch_size, -1), packed)


def _documents_of_lengths(query, **lengths):
    """lengths: cu_seq_lens_q and cu_seq_lens_k, those of them that there are."""
    name, sums = next(iter(lengths.items()))
    batch, _, tokens, _ = query.shape
    if batch != 1:
        raise ValueError(f"{name} is of one row of packed documents, and there are {batch}; flatten them into one, or leave it "
                         "out and pass position_ids that start again")
    documents = documents_of_sums(name, sums, tokens)
    if sums.device != query.device:
        raise ValueError(f"{name} is on {sums.device} and the model's inputs on {query.device}; they must be alike")
    for other, of_keys in lengths.items():
        if getattr(of_keys, "shape", None) != sums.shape:
            raise ValueError(f"{other} is {checks.described(of_keys)} and {name} {checks.described(sums)}; documents have as "
                             "many keys as queries: pass the same for both")
        if of_keys is not sums:
            torch._assert_async((of_keys == sums).all(), f"{other} must be as {name}: documents have as many keys as queries")
    return documents


def _is_traced(x):
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _documents(query, of_mask=None, position_ids=None, seq_idx=None, **lengths):
    """The documents that any of these tells apart; None where there is one a row. of_mask: starts of _documents_of_mask's, which
    knows none of packed documents where the model has a cache, or its caller says what is padding."""
    starts = [] if of_mask is None else [of_mask]
    if lengths:
        starts.append(_documents_of_lengths(query, **lengths).starts)
    if seq_idx is not None:
        starts.append(documents_from_ids(seq_idx).starts)
    if position_ids is not None and position_ids.dim() <= 2:  # positions in images tell no documents
        of_positions = documents_from_position_ids(position_ids).starts
        # Every model passes them. Rows of one document are spared what documents cost, for which the host waits once a step.
        if starts or _is_traced(query) or of_positions.any():
            starts.append(of_positions)
    return Documents(functools.reduce(torch.maximum, starts)) if starts else None


class _LastStep:
    """Documents, made once for all layers of a step, which are called with the same tensors."""

    def __init__(self):
        self._known = None

    def documents(self, query, **told_by):
        """_documents(query, **told_by)"""
        tensors = told_by.values()
        # A replayed graph must look again at its tensors, and whether inference tensors have changed is not known; what
        # inference makes, training does not take.
        if (_is_traced(query) or torch.is_inference_mode_enabled()
                or not all(isinstance(x, torch.Tensor) and not x.is_inference() for x in tensors)):
            return _documents(query, **told_by)
        state, known = (query.shape, [(name, x._version) for name, x in told_by.items()]), self._known
        if known is None or known[0] != state or any(ref() is not x for ref, x in zip(known[1], tensors)):
            known = self._known = state, [weakref.ref(x) for x in tensors], _documents(query, **told_by)
        return known[2]


def register(blocks, name=NAME, dense_layers=()):
    """Makes attn_implementation=name attend to `blocks` (what sparse_attention takes), but densely in `dense_layers`.
    Models that are loaded already take what was registered last.

    Documents that are packed into rows are kept apart: one ends where position_ids do not go on by one, seq_idx changes,
    cu_seq_lens_q and cu_seq_lens_k (of one row) say so or padding begins, whatever of them there is. Values of the sums are
    asserted on the device, as those of documents_from_lengths are. Models that do not hand position_ids on to attention are
    warned of by name."""
    try:
        dense_layers = frozenset(dense_layers)
    except TypeError:
        raise TypeError(f"dense_layers is {dense_layers!r}; it must hold numbers of layers, as (0,) does") from None
    for layer in dense_layers:
        if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
            raise ValueError(f"dense_layers holds {layer!r}; layers are integers from 0 on")
    last_step, warned_of = _LastStep(), set()

    def warn_of_mixing(kind):
        if kind not in warned_of and not torch.compiler.is_compiling():  # a warning would break the graph
            warned_of.add(kind)
            warnings.warn(f"{kind.__name__} keeps position_ids to itself: documents that these alone tell apart are not kept "
                          f"apart by {name}; pass cu_seq_lens_q and cu_seq_lens_k, if the model hands them on", stacklevel=3)

    def forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, is_causal=None, **arguments):
        is_ours = isinstance(attention_mask, _CausalMask)
        # Some models say is_causal only where they have no mask.
        if not is_ours and not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            raise NotImplementedError(f"{name} computes causal attention; {type(module).__name__} asks for attention in "
                                      "both directions: choose another attn_implementation for it")
        for argument in _LACKING:
            if arguments.get(argument) is not None:
                raise NotImplementedError(f"{name} has no {argument}; {type(module).__name__} asks for it: choose "
                                          "another attn_implementation for this model")
        if arguments.get("output_attentions"):
            raise NotImplementedError(f"{name} has no weights of attention to return, which output_attentions asks for: leave it "
                                      "out, or choose another attn_implementation")
        if dropout > 0:
            raise NotImplementedError(f"{name} has no dropout; set config.attention_dropout = 0")
        if attention_mask is not None and not is_ours:
            raise NotImplementedError(f"{name} takes attention_mask as [batch, tokens] of the model's inputs, of which "
                                      "transformers' create_causal_mask makes what layers get, and not as a mask that is "
                                      f"{checks.described(attention_mask)}")
        layer = getattr(module, "layer_idx", None)
        if dense_layers and layer is None:
            raise ValueError(f"dense_layers names layers by layer_idx, which {type(module).__name__} does not have; leave it out")
        chosen = None if layer in dense_layers else blocks
        told_by = {of: arguments[of] for of in _TOLD_BY if arguments.get(of) is not None}
        if not told_by and not (is_ours and attention_mask.packed):
            warn_of_mixing(type(module))
        if is_ours and attention_mask.starts is not None:
            told_by["of_mask"] = attention_mask.starts.to(query.device)
        documents = last_step.documents(query, **told_by)
        out = sparse_attention(query, key, value, chosen, documents=documents, scale=scaling)
        return out.transpose(1, 2), None

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, _documents_of_mask)
