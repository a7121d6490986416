"""attn_implementation="ringleader_sparse": small models of transformers train as they do with SDPA."""

import pytest
import torch
from oracle import CUDA, DEVICE, DTYPE

from ringleader import kernels

transformers = pytest.importorskip("transformers")
from ringleader.kernels import huggingface  # noqa: E402


def model_of(kind, implementation, **arguments):
    torch.manual_seed(0)
    config = {"qwen2": transformers.Qwen2Config, "llama": transformers.LlamaConfig,
              "mistral": transformers.MistralConfig}[kind](
        vocab_size=97, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024, **arguments)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    return model.to(DEVICE, DTYPE)


def tokens_of(batch, tokens):
    """Text that can be learned: each token repeats the one 7 before it, but for some."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(97, (batch, tokens), generator=generator)
    for i in range(7, tokens):
        ids[:, i] = torch.where(torch.rand(batch, generator=generator) < 0.9, ids[:, i - 7], ids[:, i])
    return ids.to(DEVICE)


def losses(model, steps, **inputs):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    result = []
    for _ in range(steps):
        loss = model(**inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result.append(loss.item())
    return result


@pytest.fixture
def dense():
    huggingface.register(None)


def agree(actual, expected):
    """bf16 models drift apart from rounding."""
    tolerance = 2e-2 if CUDA else 1e-4
    assert all(abs(a - b) < tolerance * b for a, b in zip(actual, expected)), (actual, expected)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_trains_as_sdpa_does(kind, dense):
    ids = tokens_of(2, 256)
    actual, expected = (losses(model_of(kind, name), 8, input_ids=ids, labels=ids)
                        for name in (huggingface.NAME, "sdpa"))
    agree(actual, expected)
    assert actual[-1] < 0.9 * actual[0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side, dense):
    ids = tokens_of(2, 128)
    attention_mask = torch.ones_like(ids)
    attention_mask[1, :50] = 0
    if side == "right":
        attention_mask = attention_mask.flip(1)
    # Padding predicts nothing: neither is it learned, nor what follows it.
    after_padding = torch.nn.functional.pad(attention_mask, (1, 0), value=1)[:, :-1] == 0
    labels = ids.masked_fill((attention_mask == 0) | after_padding, -100)
    inputs = {"input_ids": ids, "labels": labels, "attention_mask": attention_mask}
    agree(*(losses(model_of("llama", name), 3, **inputs) for name in (huggingface.NAME, "sdpa")))


CHOICES = [
    kernels.VerticalSlash(estimate_queries=32, max_columns=32, sink_tokens=4, max_diagonals=2, tile=64),
    kernels.Moba(block_size=64, topk_blocks=2, tile=64),
    kernels.XAttention(density=0.5, tile=64),
    kernels.KeyGroups(density=0.3),
]


@pytest.mark.parametrize("choice", CHOICES)
def test_trains_sparsely(choice):
    huggingface.register(choice, dense_layers=(1,))
    ids = tokens_of(1, 512)
    sparse, sdpa = (losses(model_of("qwen2", name), 8, input_ids=ids, labels=ids) for name in (huggingface.NAME, "sdpa"))
    # Nothing is learned yet at first, and tokens that are to be remembered need little of what lies before them.
    assert sparse[0] == pytest.approx(sdpa[0], rel=0.01)
    assert sparse[-1] < 0.9 * sparse[0] and sparse[-1] < 1.1 * sdpa[-1]


@pytest.mark.parametrize("choice", CHOICES)
def test_attends_to_what_was_registered(choice):
    """A choice is far from dense attention, by what two implementations of that differ; in dense layers it has no say."""
    ids = tokens_of(1, 512)

    def logits(name, *registered, **more):
        if registered:
            huggingface.register(*registered, **more)
        with torch.no_grad():
            return model_of("qwen2", name)(ids).logits.float()

    dense, sdpa = logits(huggingface.NAME, None), logits("sdpa")
    noise = (dense - sdpa).abs().max()
    in_a_layer, in_both = logits(huggingface.NAME, choice, dense_layers=(1,)), logits(huggingface.NAME, choice)
    assert (in_a_layer - dense).abs().max() > 10 * noise
    assert (in_both - in_a_layer).abs().max() > 10 * noise
    assert torch.equal(logits(huggingface.NAME, choice, dense_layers=(0, 1)), dense)


def test_generates_prefill_alone(dense):
    model = model_of("qwen2", huggingface.NAME)
    ids = tokens_of(1, 100)
    with pytest.raises(NotImplementedError, match="set_attn_implementation"):
        model.generate(ids, max_new_tokens=2)
    logits = model(ids).logits
    model.set_attn_implementation("sdpa")
    assert torch.allclose(logits.float(), model(ids).logits.float(), atol=5e-2 if CUDA else 1e-4)
    model.generate(ids, max_new_tokens=2)


def test_what_models_ask_for_and_it_lacks(dense):
    ids = tokens_of(1, 64)
    with pytest.raises(NotImplementedError, match="sliding_window"):
        model_of("mistral", huggingface.NAME, sliding_window=32)(ids)
    with pytest.raises(NotImplementedError, match="output_attentions"):
        model_of("qwen2", huggingface.NAME)(ids, output_attentions=True)
    with pytest.raises(NotImplementedError, match="attention_dropout"):
        model_of("qwen2", huggingface.NAME, attention_dropout=0.1).train()(ids)
    with pytest.raises(NotImplementedError, match="attention_mask as"):
        model_of("qwen2", huggingface.NAME)(ids, attention_mask=torch.zeros(1, 1, 64, 64, device=DEVICE))


SMALL = {"vocab_size": 97, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
COMPUTE_ATTENTION_THEMSELVES = {
    "codegen": lambda: transformers.CodeGenConfig(n_embd=128, n_layer=1, n_head=4, rotary_dim=16, n_positions=64, **SMALL),
    "bloom": lambda: transformers.BloomConfig(hidden_size=128, n_layer=1, n_head=4, **SMALL),
    "xglm": lambda: transformers.XGLMConfig(d_model=128, ffn_dim=128, num_layers=1, attention_heads=4, **SMALL),
    "gpt_neox_japanese": lambda: transformers.GPTNeoXJapaneseConfig(
        hidden_size=128, num_hidden_layers=1, num_attention_heads=4, **SMALL),
}


@pytest.mark.parametrize("name", COMPUTE_ATTENTION_THEMSELVES)
def test_models_that_compute_attention_themselves_are_refused(name, dense):
    """Without a mask they would see what lies ahead."""
    model = transformers.AutoModelForCausalLM.from_config(
        COMPUTE_ATTENTION_THEMSELVES[name](), attn_implementation=huggingface.NAME).to(DEVICE)
    ids = tokens_of(2, 32)
    for given in ({}, {"attention_mask": torch.ones_like(ids)}):
        with pytest.raises((NotImplementedError, AttributeError), match="computes attention with masks itself"):
            model(ids, **given)


def test_masks_of_models_are_no_tensors():
    mask = huggingface._documents_of_mask(1, 4, 4)
    x = torch.ones(1, 1, 4, 4)
    for use in (lambda: x + mask, lambda: mask + x, lambda: mask[:, :2], lambda: mask == 0, lambda: 1 - mask, lambda: bool(mask),
                lambda: ~mask, lambda: x.masked_fill(mask, 0), lambda: torch.where(mask, x, 0), lambda: mask.dtype,
                lambda: torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)):
        with pytest.raises((NotImplementedError, AttributeError), match="choose another attn_implementation"):
            use()


def attend_as(module, **arguments):
    """Calls the attention function as a layer does."""
    q, k, v = (torch.randn(1, 2, 16, 64, device=DEVICE, dtype=DTYPE) for _ in range(3))
    return transformers.AttentionInterface().get_interface(huggingface.NAME, None)(
        module, q, k, v, **{"attention_mask": None, "position_ids": torch.arange(16, device=DEVICE).unsqueeze(0), **arguments})[0]


@pytest.mark.parametrize("name", ["block_indices", "indices", "softcap", "s_aux", "position_bias", "sliding_window"])
def test_arguments_that_are_refused(name, dense):
    attend_as(torch.nn.Identity(), **{name: None})
    with pytest.raises(NotImplementedError, match=f"has no {name}; Identity asks for it"):
        attend_as(torch.nn.Identity(), **{name: torch.zeros(1, 2, 16, 4, dtype=torch.int64)})


def test_what_says_whether_attention_is_causal(dense):
    with pytest.raises(NotImplementedError, match="both directions"):
        attend_as(torch.nn.Identity(), is_causal=False)
    attend_as(torch.nn.Identity(), is_causal=False, attention_mask=huggingface._documents_of_mask(1, 16, 16))
    with pytest.raises(NotImplementedError, match="attention_mask as .* not as a mask that is torch.int64"):
        attend_as(torch.nn.Identity(), attention_mask=torch.ones(1, 16, dtype=torch.int64))


def test_dense_layers_that_are_refused():
    for layers, kind, message in (
            (0, TypeError, "dense_layers is 0; it must hold numbers of layers"), ((-1,), ValueError, "dense_layers holds -1"),
            ((0, 1.0), ValueError, "dense_layers holds 1.0"), ("0", ValueError, "dense_layers holds '0'"),
            ([True], ValueError, "dense_layers holds True"), (([0],), TypeError, "dense_layers is")):
        with pytest.raises(kind, match=message):
            huggingface.register(None, dense_layers=layers)
    huggingface.register(None, dense_layers=iter([0]))
    with pytest.raises(ValueError, match="layer_idx, which Identity does not have"):
        attend_as(torch.nn.Identity())


def test_padding_in_the_middle_is_refused(dense):
    if CUDA:
        pytest.skip("the assertion ends the process's use of the GPU")
    ids, model = tokens_of(2, 64), model_of("llama", huggingface.NAME)
    attention_mask = torch.ones_like(ids)
    attention_mask[0, :10], attention_mask[1, 50:] = 0, 0
    model(ids, attention_mask=attention_mask)
    attention_mask[1, 20:30] = 0
    with pytest.raises(RuntimeError, match="not in its middle"):
        model(ids, attention_mask=attention_mask)


@pytest.mark.parametrize("choice", [None, kernels.VerticalSlash(tile=64), kernels.Moba(block_size=64, tile=64)])
def test_autocast(choice):
    """Weights in float32: rotary embeddings leave q and k in it, and v comes in bf16."""
    huggingface.register(choice)
    ids = tokens_of(1, 256)
    results = []
    for name in (huggingface.NAME, "sdpa"):
        model = model_of("qwen2", name).float()
        with torch.autocast(DEVICE, torch.bfloat16):
            results.append(losses(model, 3, input_ids=ids, labels=ids))
    assert all(abs(a - b) < 2e-2 * b for a, b in zip(*results)), results


def test_gradient_checkpointing(dense):
    ids = tokens_of(1, 128)
    model = model_of("llama", huggingface.NAME)
    expected = losses(model_of("llama", huggingface.NAME).train(), 2, input_ids=ids, labels=ids)
    model.gradient_checkpointing_enable()
    agree(losses(model.train(), 2, input_ids=ids, labels=ids), expected)
