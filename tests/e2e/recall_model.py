#!/usr/bin/env python3
"""Writes a model folder whose weights are put together, not trained: a decoder of two layers that answers `recall`
(bench/quality/tasks.py) by the textbook's induction head. Half of the residual stream is what a token is, the other half
what the token before it was.

    recall_model.py FOLDER SYMBOLS

Layer 0 attends to the previous token alone: its queries and keys are biases, whose rotary angles meet one token apart.
Layer 1 compares the current token with every token's predecessor, in dimensions that rotate so slowly that distance does
not matter, and adds what it finds to the stream, where the head reads it. The MLPs do nothing.
"""

import array
import json
import math
import pathlib
import random
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench/quality"))
import tasks  # noqa: E402

HALF = 64  # of the residual stream, and of a head's rotating pairs
HIDDEN = 2 * HALF
THETA = 1e8
SHARPNESS = 14.0  # of layer 0: 24 nats between the previous token and its neighbours
MATCH = 4.0  # of layer 1
FOUND = 8.0  # how much louder than the current token is what was found
SLOWEST = range(HALF - HALF // 2, HALF)  # pairs; the fastest turns once in 60,000 tokens


def zeros(rows, columns=1):
    return [[0.0] * columns for _ in range(rows)]


def copy(rows, columns, scale, pairs):
    matrix = zeros(rows, columns)
    for row, column in pairs:
        matrix[row][column] = scale
    return matrix


def main():
    folder, symbols = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    vocabulary = tasks.vocabulary(symbols)
    draw = random.Random(1)
    tensors = {"model.embed_tokens.weight": [[draw.choice((-1.0, 1.0)) for _ in range(HALF)] + [0.0] * HALF
                                             for _ in range(vocabulary)],
               "model.norm.weight": [1.0] * HIDDEN}
    angle = [THETA ** (-f / HALF) for f in range(HALF)]
    slow = [*SLOWEST, *(f + HALF for f in SLOWEST)]  # where a head of layer 1 keeps what it compares
    for layer in range(2):
        name = f"model.layers.{layer}."
        first = layer == 0
        tensors |= {
            name + "input_layernorm.weight": [1.0] * HIDDEN,
            name + "post_attention_layernorm.weight": [1.0] * HIDDEN,
            name + "self_attn.q_proj.weight": zeros(HIDDEN, HIDDEN) if first else
            copy(HIDDEN, HIDDEN, MATCH, [(slow[i], i) for i in range(HALF)]),
            name + "self_attn.k_proj.weight": zeros(HIDDEN, HIDDEN) if first else
            copy(HIDDEN, HIDDEN, MATCH, [(slow[i], HALF + i) for i in range(HALF)]),
            # cos(angle (distance - 1)): largest one token back.
            name + "self_attn.q_proj.bias": [SHARPNESS * math.cos(a) for a in angle] +
            [-SHARPNESS * math.sin(a) for a in angle] if first else [0.0] * HIDDEN,
            name + "self_attn.k_proj.bias": [SHARPNESS] * HALF + [0.0] * HALF if first else [0.0] * HIDDEN,
            name + "self_attn.v_proj.weight": copy(HIDDEN, HIDDEN, 1.0, [(i, i) for i in range(HALF)]),
            name + "self_attn.v_proj.bias": [0.0] * HIDDEN,
            name + "self_attn.o_proj.weight": copy(HIDDEN, HIDDEN, 1.0 if first else FOUND,
                                                   [(i + HALF * first, i) for i in range(HALF)]),
            name + "mlp.gate_proj.weight": zeros(16, HIDDEN), name + "mlp.up_proj.weight": zeros(16, HIDDEN),
            name + "mlp.down_proj.weight": zeros(HIDDEN, 16)}

    folder.mkdir(parents=True)
    header, data = {}, array.array("f")
    for name, tensor in tensors.items():
        matrix = isinstance(tensor[0], list)
        begin = 4 * len(data)
        data.extend([value for row in tensor for value in row] if matrix else tensor)
        header[name] = {"dtype": "F32", "shape": [len(tensor), len(tensor[0])] if matrix else [len(tensor)],
                        "data_offsets": [begin, 4 * len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data.tobytes())
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": HIDDEN,
        "intermediate_size": 16, "max_position_embeddings": 4096, "num_attention_heads": 1, "num_hidden_layers": 2,
        "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "rope_theta": THETA, "tie_word_embeddings": True,
        "torch_dtype": "float32", "vocab_size": vocabulary}))


if __name__ == "__main__":
    main()
