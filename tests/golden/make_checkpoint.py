#!/usr/bin/env python3
"""Writes checkpoint-v1/, a checkpoint and its owner as docs/formats.md describes them, without the code that it tests.

    venv/bin/pip install xxhash && venv/bin/python tests/golden/make_checkpoint.py

The model has a matrix of 3 x 4 and a norm of 5, saved by 2 ranks at step 7. Element i of the flat space holds i + 0.5 as
weight, -i as first and i / 4 as second moment; the gap between the two parameters holds 0.
"""

import json
import pathlib
import struct

import xxhash

FOLDER = pathlib.Path(__file__).resolve().parent / "checkpoint-v1" / "step-0000000007"
LAYOUT = {"elements": 32, "parameters": [{"name": "a.weight", "offset": 0, "shape": [3, 4]},
                                         {"name": "norm.weight", "offset": 16, "shape": [5]}]}
USED = set(range(12)) | set(range(16, 21))


def section(begin, elements, value):
    return struct.pack(f"<{elements}f", *(value(i) if i in USED else 0.0 for i in range(begin, begin + elements)))


FOLDER.mkdir(parents=True, exist_ok=True)
shards = []
for rank, (first, count) in enumerate([(0, 16), (16, 16)]):
    header = b"RLSHARD\n" + struct.pack("<IIQQ", 1, 64, first, count) + bytes(32)
    data = header + section(first, count, lambda i: i + 0.5) + section(first, count, lambda i: -float(i)) \
        + section(first, count, lambda i: i / 4)
    name = f"shard-{rank:05d}-of-00002.bin"
    (FOLDER / name).write_bytes(data)
    shards.append({"file": name, "begin": first, "elements": count, "xxh3_64": xxhash.xxh3_64_hexdigest(data)})

body = {"layout": LAYOUT, "shards": shards,
        "state": {"step": 7, "updates": 6, "skipped_steps": 1, "tokens": 7168, "data_position": 14, "seed": 42,
                  "job_digest": "0123abcd"}}


def write(path, content):
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    content["xxh3_64"] = xxhash.xxh3_64_hexdigest(canonical)
    path.write_text(json.dumps(content, sort_keys=True, indent=1) + "\n")


write(FOLDER / "manifest.json", {"format": "ringleader-checkpoint", "version": 1, "body": body})
write(FOLDER.parent / "owner.json",
      {"format": "ringleader-checkpoint-owner", "version": 1, "job": "tiny", "uid": "tiny-17a3", "token": 57})
