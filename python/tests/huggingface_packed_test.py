"""Models of transformers keep packed documents apart, whichever of its arguments tells of them, as SDPA does under a mask."""

import warnings

import pytest
import torch
from huggingface_test import losses, model_of, tokens_of
from oracle import CUDA, DEVICE, DTYPE, causal, error

from ringleader import kernels

transformers = pytest.importorskip("transformers")
from ringleader.kernels import huggingface  # noqa: E402

LENGTHS = (100, 28, 1, 127)
TOKENS = sum(LENGTHS)


def sums(lengths=LENGTHS, dtype=torch.int32):
    return torch.tensor((0, *lengths), dtype=dtype).cumsum(0, dtype=dtype).to(DEVICE)


def positions(lengths=LENGTHS):
    return torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0).to(DEVICE)


def numbers(lengths=LENGTHS):
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).unsqueeze(0).to(DEVICE)


def block_diagonal(lengths=LENGTHS):
    """What SDPA is given in place of what tells of documents: [1, 1, tokens, tokens]"""
    of_token = numbers(lengths)[0]
    return ((of_token == of_token.unsqueeze(1)) & causal(sum(lengths))).view(1, 1, sum(lengths), -1)


def of_flash():
    return {"cu_seq_lens_q": sums(), "cu_seq_lens_k": sums(), "max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}


def collated():
    ids = tokens_of(1, TOKENS)[0].cpu()
    features = [{"input_ids": part.tolist()} for part in ids.split(LENGTHS)]
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    return {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in collator(features).items()
            if name not in ("input_ids", "labels")}


# Models have a cache by default, and transformers then makes no mask of documents, nor does it beside a mask of padding.
TOLD_BY = {
    "position_ids": lambda: {"position_ids": positions()},
    "position_ids without a cache": lambda: {"position_ids": positions(), "use_cache": False},
    "position_ids beside a mask": lambda: {
        "position_ids": positions(), "attention_mask": torch.ones(1, TOKENS, dtype=torch.int64, device=DEVICE)},
    "cu_seq_lens": of_flash,
    "cu_seq_lens of 64 bits": lambda: {"cu_seq_lens_q": sums(dtype=torch.int64), "cu_seq_lens_k": sums(dtype=torch.int64)},
    "cu_seq_lens and a mask": lambda: {**of_flash(), "attention_mask": torch.ones(1, TOKENS, dtype=torch.int64, device=DEVICE)},
    "cu_seq_lens of queries": lambda: {"cu_seq_lens_q": sums()},
    "seq_idx": lambda: {"seq_idx": numbers().int()},
    "the collator": collated,
}


def gradients(model, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.item(), {name: x.grad.clone() for name, x in model.named_parameters()}


@pytest.fixture
def dense():
    huggingface.register(None)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("name", TOLD_BY)
def test_trains_as_sdpa_with_a_mask(name, kind, dense):
    ids, told_by = tokens_of(1, TOKENS), TOLD_BY[name]()
    inputs = {"input_ids": ids, "labels": ids}
    # Positions are the same for both, and SDPA has documents of its mask alone.
    masked = {**inputs, "attention_mask": block_diagonal()}
    if "position_ids" in told_by:
        masked["position_ids"] = told_by["position_ids"]
    loss, of_parameters = gradients(model_of(kind, huggingface.NAME), **inputs, **told_by)
    wanted, wanted_of = gradients(model_of(kind, "sdpa"), **masked)
    assert abs(loss - wanted) < (2e-2 if CUDA else 1e-5) * wanted
    for parameter, gradient in of_parameters.items():
        assert error(gradient, wanted_of[parameter]) < (5e-2 if CUDA else 1e-4), parameter
    actual, expected = (losses(model_of(kind, of), 4, **given) for of, given in (
        (huggingface.NAME, {**inputs, **told_by}), ("sdpa", masked)))
    assert all(abs(a - b) < (2e-2 if CUDA else 1e-4) * b for a, b in zip(actual, expected)), (actual, expected)
    mixed = losses(model_of(kind, "sdpa"), 4, **{of: x for of, x in masked.items() if of != "attention_mask"}, use_cache=True)
    assert abs(mixed[-1] - actual[-1]) > 1e-3  # to see documents mixed makes a difference


@pytest.mark.parametrize("choice", [None, kernels.SlidingWindow(60), kernels.Moba(block_size=64, topk_blocks=2, tile=64),
                                    kernels.XAttention(density=0.5, tile=64), kernels.KeyGroups(density=0.5)])
@pytest.mark.parametrize("name", ["position_ids", "cu_seq_lens"])
def test_a_document_does_not_depend_on_another(name, choice):
    """128 tokens of other documents precede the last, which is computed as without them."""
    huggingface.register(choice)
    model, ids = model_of("qwen2", huggingface.NAME), tokens_of(1, 256)
    told_by = {"position_ids": positions((100, 28, 128))}
    if name == "cu_seq_lens":
        told_by.update(cu_seq_lens_q=sums((100, 28, 128)), cu_seq_lens_k=sums((100, 28, 128)))
    with torch.no_grad():
        packed, alone = model(ids, **told_by).logits[:, 128:], model(ids[:, 128:]).logits
    assert error(packed, alone) < (2e-2 if CUDA else 1e-5)


def test_rows_of_a_batch_have_documents_of_their_own(dense):
    ids, lengths = tokens_of(2, TOKENS), (LENGTHS, LENGTHS[::-1])
    inputs = {"input_ids": ids, "labels": ids, "position_ids": torch.cat([positions(x) for x in lengths])}
    loss, of_parameters = gradients(model_of("qwen2", huggingface.NAME), **inputs)
    wanted, wanted_of = gradients(model_of("qwen2", "sdpa"), **inputs,
                                  attention_mask=torch.cat([block_diagonal(x) for x in lengths]))
    assert abs(loss - wanted) < (2e-2 if CUDA else 1e-5) * wanted
    for parameter, gradient in of_parameters.items():
        assert error(gradient, wanted_of[parameter]) < (5e-2 if CUDA else 1e-4), parameter


def test_documents_that_end_where_either_says(dense):
    """Padding after the last document, and sums of lengths that join what positions part."""
    ids = tokens_of(1, TOKENS)
    attention_mask = torch.ones(1, TOKENS, dtype=torch.int64, device=DEVICE)
    attention_mask[:, -27:] = 0
    labels = ids.masked_fill(attention_mask == 0, -100)
    lengths = (100, 28, 1, 100, 27)
    given = {"position_ids": positions(), "attention_mask": attention_mask, "cu_seq_lens_q": sums((128, 128)),
             "cu_seq_lens_k": sums((128, 128))}
    actual = gradients(model_of("qwen2", huggingface.NAME), input_ids=ids, labels=labels, **given)[0]
    expected = gradients(model_of("qwen2", "sdpa"), input_ids=ids, labels=labels, position_ids=positions(),
                         attention_mask=block_diagonal(lengths))[0]
    assert abs(actual - expected) < (2e-2 if CUDA else 1e-5) * expected


def test_documents_are_made_once_a_step(dense, monkeypatch):
    made, make = [], huggingface.documents_from_position_ids
    monkeypatch.setattr(huggingface, "documents_from_position_ids", lambda x: made.append(1) or make(x))
    model, ids, position_ids = model_of("qwen2", huggingface.NAME), tokens_of(1, TOKENS), positions()

    def alike(a, b):
        return error(a, b) < (1e-2 if CUDA else 1e-6)

    with torch.no_grad():
        first = model(ids, position_ids=position_ids).logits
        assert len(made) == 1  # for two layers
        position_ids.copy_(torch.arange(TOKENS))  # the same tensor tells of others
        second = model(ids, position_ids=position_ids).logits
        assert len(made) == 2
        assert alike(second, model(ids).logits) and error(second, first) > 0.1
    with torch.inference_mode():
        position_ids = positions()
        assert alike(model(ids, position_ids=position_ids).logits, first)
        position_ids.copy_(torch.arange(TOKENS))
        assert alike(model(ids, position_ids=position_ids).logits, second)


def test_a_row_of_one_document_has_no_documents():
    """They cost time, and not every choice goes with them."""
    huggingface.register(kernels.VerticalSlash(estimate_at="end", estimate_queries=32, tile=64))
    model, ids = model_of("qwen2", huggingface.NAME), tokens_of(2, 128)
    model(ids, labels=ids).loss.backward()
    model(ids, labels=ids, use_cache=False).loss.backward()
    with pytest.raises(ValueError, match="estimate_at is 'end' beside documents"):
        model(ids[:1], position_ids=positions((100, 28)))


def test_models_that_keep_position_ids_to_themselves_are_warned_of(dense):
    config = transformers.PersimmonConfig(vocab_size=97, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
                                          num_attention_heads=2, max_position_embeddings=256)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=huggingface.NAME).to(DEVICE, DTYPE)
    ids = tokens_of(1, TOKENS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(ids, position_ids=positions(), use_cache=False)  # then transformers hands them on as a mask
        model_of("qwen2", huggingface.NAME)(ids, position_ids=positions())
        model_of("qwen2", huggingface.NAME)(ids)
        assert not [x for x in caught if "position_ids" in str(x.message)]
        for given in ({}, {"attention_mask": torch.ones_like(ids)}):
            model(ids, position_ids=positions(), **given)
        of_them = [str(x.message) for x in caught if "position_ids" in str(x.message)]
    assert len(of_them) == 1 and of_them[0].startswith("PersimmonAttention keeps position_ids to itself")


@pytest.mark.parametrize("name", ["position_ids", "cu_seq_lens"])
def test_compiled(name, dense):
    torch._dynamo.reset()
    model, ids = model_of("qwen2", huggingface.NAME), tokens_of(1, TOKENS)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False, **TOLD_BY[name]()}
    expected, wanted_of = gradients(model, **inputs)
    model.model.forward = torch.compile(model.model.forward, backend="aot_eager")
    loss, of_parameters = gradients(model, **inputs)
    assert abs(loss - expected) < (2e-2 if CUDA else 1e-5) * expected
    for parameter, gradient in of_parameters.items():
        assert error(gradient, wanted_of[parameter]) < (5e-2 if CUDA else 1e-4), parameter


def test_recomputed(dense):
    ids = tokens_of(1, TOKENS)
    model = model_of("llama", huggingface.NAME).train()
    expected = gradients(model, input_ids=ids, labels=ids, **of_flash())
    model.gradient_checkpointing_enable()
    actual = gradients(model, input_ids=ids, labels=ids, **of_flash())
    for parameter, gradient in actual[1].items():
        assert error(gradient, expected[1][parameter]) < (5e-2 if CUDA else 1e-5), parameter


def test_lengths_that_are_refused(dense):
    model, ids = model_of("qwen2", huggingface.NAME), tokens_of(2, 64)

    def refused(message, rows=1, kind=ValueError, **lengths):
        with pytest.raises(kind, match=message):
            model(ids[:rows], **lengths)

    whole = sums((20, 44))
    refused("cu_seq_lens_q is of one row of packed documents, and there are 2", rows=2, cu_seq_lens_q=whole)
    refused(r"cu_seq_lens_q is \[1, 3\]; it must be \[documents \+ 1\]", cu_seq_lens_q=whole.view(1, 3))
    refused("cu_seq_lens_q is a list; it must be integers", cu_seq_lens_q=[0, 64])
    refused("cu_seq_lens_q is on meta", cu_seq_lens_q=whole.to("meta"))
    refused("cu_seq_lens_k is torch.int32 .2. and cu_seq_lens_q torch.int32 .3.; .* the same for both", cu_seq_lens_q=whole,
            cu_seq_lens_k=sums((64,)))
    if CUDA:
        return  # an assertion ends the process's use of the GPU
    refused("cu_seq_lens_q must be sums of lengths, which ascend from 0 to tokens", kind=RuntimeError, cu_seq_lens_q=sums((20, 43)))
    refused("cu_seq_lens_k must be sums of lengths", kind=RuntimeError, cu_seq_lens_k=sums((65, -1)))
    refused("cu_seq_lens_k must be as cu_seq_lens_q", kind=RuntimeError, cu_seq_lens_q=whole, cu_seq_lens_k=sums((21, 43)))
