#!/usr/bin/env python3
"""Makes Hugging Face folders of real shapes with random weights, and checks what came of training them (models.sh)."""

import json
import pathlib
import sys

import torch
import transformers

MODELS = pathlib.Path(__file__).resolve().parents[2] / "bench" / "models"  # those of the benches
QWEN = dict(vocab_size=151936, max_position_embeddings=32768, rope_theta=1e6, rms_norm_eps=1e-6)
SHAPES = {
    "qwen2.5-0.5b": (transformers.Qwen2Config, dict(
        QWEN, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen2.5-0.5b-yarn": (transformers.Qwen2Config, dict(
        QWEN, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=4096))),
    "qwen2.5-1.5b": (transformers.Qwen2Config, dict(
        QWEN, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, tie_word_embeddings=True)),
    **{name: (kind, json.loads((MODELS / f"{name}.json").read_text())) for name, kind in (
        ("qwen2.5-3b", transformers.Qwen2Config), ("qwen2.5-7b", transformers.Qwen2Config),
        ("llama3.1-8b", transformers.LlamaConfig))},
}


def loss(folder, ids):
    """Mean cross entropy of the next token, in bf16 with fp32 logits a piece at a time."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map="cuda", attn_implementation="sdpa", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    with torch.no_grad():
        hidden = model.model(ids[None].cuda()).last_hidden_state[0, :-1]
        labels = ids[1:].cuda()
        total = 0.0
        for piece, wanted in zip(hidden.split(2048), labels.split(2048)):
            total += torch.nn.functional.cross_entropy(model.lm_head(piece).float(), wanted, reduction="sum").item()
    return total / len(labels)


def make(shape, folder, ids_file, tokens, layers):
    kind, values = SHAPES[shape]
    if layers:
        values = dict(values, num_hidden_layers=layers)
    torch.manual_seed(1)
    config = kind(**values, dtype="bfloat16")
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        # Biases too: zeros would not show whether they are used.
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder)
    # A skewed distribution, so that a few steps can learn something; one token more than a sequence needs.
    weights = 1.0 / torch.arange(1, 1001)
    torch.multinomial(weights, tokens + 1, replacement=True).to(torch.int32).numpy().tofile(ids_file)


def check(shape, folder, tokens):
    ids = torch.from_file(f"{folder}/ids.bin", dtype=torch.int32, size=tokens + 1)[: tokens + 1].long()
    summary = json.load(open(f"{folder}/summary.json"))
    good = True
    for name, path, ours in (("original", f"{folder}/original", summary["heldout_first"]),
                             ("trained", summary["model"], summary["heldout_last"])):
        theirs = loss(path, ids)
        near = abs(ours - theirs) < 5e-3 * theirs
        good &= near
        print(f"{shape}, {name}: held-out loss {ours:.4f}, transformers {theirs:.4f}{'' if near else '  DIFFERS'}")
    if not summary["heldout_last"] < summary["heldout_first"]:
        print(f"{shape}: nothing was learnt")
        good = False
    return good


match sys.argv[1:]:
    case ["shapes"]:
        print(" ".join(SHAPES))
    case ["make", shape, folder, ids_file, tokens, layers]:
        make(shape, folder, ids_file, int(tokens), int(layers))
    case ["check", shape, folder, tokens]:
        sys.exit(0 if check(shape, folder, int(tokens)) else 1)
    case _:
        sys.exit(__doc__)
