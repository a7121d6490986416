#!/usr/bin/env python3
"""Trains a small model of transformers on the bytes of a folder's text, with sparse attention.

    python/examples/train_transformers.py [--text FOLDER] [--tokens N] [--steps N] [--documents] [--attention sdpa]
"""

import argparse
import pathlib

import torch
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Qwen2Config

from ringleader.kernels import VerticalSlash, huggingface

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--text", type=pathlib.Path, default=pathlib.Path(torch.__file__).parent / "nn")
parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--documents", action="store_true", help="pack files into sequences, and keep them apart")
parser.add_argument("--attention", default=huggingface.NAME)
options = parser.parse_args()

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
device, dtype = ("cuda", torch.bfloat16) if hopper else ("cpu", torch.float32)
files = [file.read_bytes() for file in sorted(options.text.rglob("*.py"))]
text = torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8).long()
pack = DataCollatorWithFlattening(return_flash_attn_kwargs=True)


def batch_of_text():
    first = torch.randint(len(text) - options.tokens, ()).item()
    ids = text[first : first + options.tokens].unsqueeze(0)
    return {"input_ids": ids, "labels": ids}


def batch_of_documents():
    """Whole files, but for the last: position_ids that start again, and cu_seq_lens_q and cu_seq_lens_k."""
    documents, left = [], options.tokens
    while left > 0:
        document = files[torch.randint(len(files), ())][:left]
        if document:
            documents.append({"input_ids": list(document)})
        left -= len(document)
    return pack(documents)



huggingface.register(VerticalSlash(density=0.3), dense_layers=(0,))
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(
    Qwen2Config(vocab_size=256, hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=1, max_position_embeddings=options.tokens),
    attn_implementation=options.attention, dtype=dtype).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(options.steps):
    batch = batch_of_documents() if options.documents else batch_of_text()
    loss = model(**{name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
