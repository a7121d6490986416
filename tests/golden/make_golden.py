#!/usr/bin/env python3
"""Makes the golden models beside this file: tiny decoders with random weights, and what transformers computes for them.

    python3 -m venv venv && venv/bin/pip install torch==2.11.0 transformers==5.23.0 safetensors numpy
    venv/bin/python tests/golden/make_golden.py

A folder a case: config.json and model.safetensors as save_pretrained writes them, and expected.safetensors with tokens,
labels (-100: none), logits, the summed loss and the gradient of that sum by every parameter ("grad." + name), all fp32.
dtypes.safetensors holds the same numbers in each stored type.
"""

import pathlib

import torch
import transformers
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).resolve().parent
TOKENS = 48

SMALL = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
)
LLAMA3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=24, rope_theta=10000.0)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=10000.0)

CASES = {
    "qwen2": ("qwen2", dict(num_hidden_layers=2, rope_theta=1000000.0)),
    "llama": ("llama", dict(num_hidden_layers=2, tie_word_embeddings=False)),
    "llama-bias": ("llama", dict(attention_bias=True, mlp_bias=True, head_dim=16)),
    "qwen2-linear": ("qwen2", dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=10000.0))),
    "qwen2-dynamic": ("qwen2", dict(max_position_embeddings=32,
                                    rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0))),
    "qwen2-yarn": ("qwen2", dict(rope_parameters=YARN)),
    "llama-llama3": ("llama", dict(rope_parameters=LLAMA3)),
}


def randomize(model):
    """Every parameter away from its initial value, so that a forgotten bias or norm shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.15 * torch.randn_like(parameter))


def make_case(name, family, overrides, seed):
    torch.manual_seed(seed)
    arguments = SMALL | overrides
    config_class, model_class = {
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }[family]
    model = model_class._from_config(config_class(**arguments), attn_implementation="eager").float().train()
    randomize(model)

    tokens = torch.randint(0, arguments["vocab_size"], (TOKENS,))
    labels = torch.cat([tokens[1:], torch.tensor([-100])])
    labels[5:8] = -100
    logits = model(tokens[None]).logits[0]
    loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    loss.backward()

    folder = HERE / name
    model.save_pretrained(folder)
    for extra in folder.glob("generation_config.json"):
        extra.unlink()
    expected = {"tokens": tokens.float(), "labels": labels.float(), "logits": logits.detach(),
                "loss": loss.detach().reshape(1)}
    expected |= {"grad." + key: p.grad for key, p in model.named_parameters()}
    save_file({key: value.contiguous() for key, value in expected.items()}, folder / "expected.safetensors")
    print(f"{name}: loss {loss.item():.6f}")


def make_dtypes():
    torch.manual_seed(99)
    values = torch.cat([torch.randn(59), torch.tensor([0.0, -0.0, 6.1e-5, -3.0e-7, 65504.0])])
    half, brain = values.to(torch.float16), values.to(torch.bfloat16)
    save_file({"f16": half, "f16.as_f32": half.float(), "bf16": brain, "bf16.as_f32": brain.float()},
              HERE / "dtypes.safetensors")


for number, (case, (model_family, case_overrides)) in enumerate(CASES.items()):
    make_case(case, model_family, case_overrides, seed=number + 1)
make_dtypes()
