#!/usr/bin/env python3
"""Checks that transformers loads what Ringleader exports, and computes the logits it computed for the original.

    venv/bin/python tests/golden/check_export.py build/bin/model_test

Runs the test that exports every golden model, keeps the exports, and loads each with from_pretrained. The virtual
environment is that of make_golden.py.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file

HERE = pathlib.Path(__file__).resolve().parent

with tempfile.TemporaryDirectory() as exports:
    subprocess.run([sys.argv[1], "--gtest_filter=*Export*_keep", "--gtest_brief=1"], check=True, cwd=HERE.parents[1],
                   env=os.environ | {"RINGLEADER_EXPORT_DIR": exports})
    cases = sorted(path.parent.name for path in HERE.glob("*/expected.safetensors"))
    assert sorted(os.listdir(exports)) == cases, os.listdir(exports)
    for case in cases:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            pathlib.Path(exports) / case, attn_implementation="eager", dtype="auto").eval()
        assert model.dtype == torch.float32, model.dtype
        expected = load_file(HERE / case / "expected.safetensors")
        with torch.no_grad():
            logits = model(expected["tokens"].long()[None]).logits[0]
        assert torch.equal(logits, expected["logits"]), (logits - expected["logits"]).abs().max()
        print(f"{case}: equal logits")
