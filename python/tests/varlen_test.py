"""sparse_attention_varlen: packed sequences, forward and backward, against float64 and against each sequence alone."""

import pytest
import torch
from oracle import CUDA, DEVICE, TOLERANCE, causal, check, error, inputs, pairs_of_tiles, random_tiles

from ringleader import kernels
from ringleader.kernels import sparse_attention, sparse_attention_varlen

TOKENS = 300
# Sequences' ends inside tiles, on their edges and where another sequence is empty.
ENDS = {
    "one": (0, 300),
    "several": (0, 37, 64, 65, 200, 300),
    "empty": (0, 0, 0, 128, 128, 129, 300, 300),
}
CHOICES = {
    "moba": kernels.Moba(block_size=64, topk_blocks=2, tile=64),
    "xattention": kernels.XAttention(density=0.5, tile=64),
    "key_groups": kernels.KeyGroups(density=0.5),
    "vertical_slash": kernels.VerticalSlash(estimate_queries=32, max_columns=8, sink_tokens=4, max_diagonals=2, tile=64),
}


def sums(ends, dtype=torch.int32):
    return torch.tensor(ends, dtype=dtype, device=DEVICE)


def same_sequence(ends, tokens=TOKENS):
    of_token = torch.bucketize(torch.arange(tokens), torch.tensor(ends[1:]), right=True).to(DEVICE)
    return of_token == of_token.unsqueeze(1)


def packed_inputs(heads, kv_heads, tokens, head_dim, **arguments):
    """q, k, v as projections of a packed row make them: [tokens, heads, head_dim]"""
    return [x.detach()[0].transpose(0, 1).requires_grad_() for x in inputs(1, heads, kv_heads, tokens, head_dim, **arguments)]


def packed(ends, blocks=None, **arguments):
    """What `check` calls with [1, heads, tokens, head_dim]"""

    def attend(q, k, v):
        out, lse = sparse_attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), sums(ends), blocks, return_lse=True,
                                           **arguments)
        assert out.shape == (q.shape[2], q.shape[1], q.shape[3]) and out.is_contiguous()
        assert lse.shape == (q.shape[1], q.shape[2])
        return out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)

    return attend


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(4, 2, 64), (3, 1, 128)])
def test_dense(name, heads, kv_heads, head_dim):
    alone = same_sequence(ENDS[name])
    check(packed(ENDS[name]), *inputs(1, heads, kv_heads, TOKENS, head_dim), causal(TOKENS) & alone)
    check(packed(ENDS[name], mask="full"), *inputs(1, heads, kv_heads, TOKENS, head_dim), alone)


def forms():
    """name -> (blocks and other arguments, pairs of the row before sequences are kept apart)"""
    kept, near = random_tiles(1, 4, TOKENS, 64), (torch.arange(TOKENS) - torch.arange(TOKENS).unsqueeze(1)).abs().to(DEVICE)
    pairs, below = pairs_of_tiles(kept, TOKENS, 64), causal(TOKENS)
    diagonals = torch.rand(1, 4, 5, generator=torch.Generator().manual_seed(5)).to(DEVICE) < 0.4
    row = torch.arange(5, device=DEVICE)
    of_diagonals = diagonals[..., (row.unsqueeze(1) - row).clamp(min=0)] | torch.eye(5, dtype=torch.bool, device=DEVICE)
    of_columns = pairs_of_tiles(of_diagonals, TOKENS, 64)
    of_columns[..., [7, 210]] = True
    columns = kernels.selected_columns(torch.tensor([7, 210]).to(DEVICE).expand(1, 4, 2),
                                       torch.full((1, 4), 2, device=DEVICE), tokens=TOKENS)
    lists = kept.sum(-1), kept.int().argsort(-1, descending=True)
    return {
        "window": ({"blocks": kernels.SlidingWindow(50)}, below & (near < 50)),
        "tiles": ({"blocks": kernels.tiles_from_mask(kept, tokens=TOKENS, tile=64)}, below & pairs),
        "tiles ahead": ({"blocks": kernels.tiles_from_mask(kept, tokens=TOKENS, tile=64, causal=False), "mask": "full"}, pairs),
        "lists": ({"blocks": kernels.tiles_from_lists(*lists, tokens=TOKENS, heads=4, block_size=64)}, below & pairs),
        "columns": ({"blocks": kernels.block_diagonals(diagonals, tile=64), "columns": columns}, below & of_columns),
        "intervals": ({"mask": kernels.key_intervals("full_window", TOKENS, window=40, device=DEVICE)}, near < 40),
        "two intervals": ({"mask": kernels.key_intervals("global_sliding", TOKENS, window=40, device=DEVICE)},
                          (near < 40) | (torch.arange(TOKENS, device=DEVICE) < 40) | causal(TOKENS)[:, :1] & (
                              torch.arange(TOKENS, device=DEVICE) < 40).unsqueeze(1)),
        "intervals and tiles": (
            {"blocks": kernels.tiles_from_mask(kept, tokens=TOKENS, tile=64, causal=False),
             "mask": kernels.key_intervals("full", TOKENS, device=DEVICE)}, pairs),
    }


@pytest.mark.parametrize("name", forms())
@pytest.mark.parametrize("ends", ENDS)
def test_forms(name, ends):
    arguments, pairs = forms()[name]
    check(packed(ENDS[ends], **arguments), *inputs(1, 4, 2, TOKENS, 64), pairs & same_sequence(ENDS[ends]))


@pytest.mark.parametrize("name", CHOICES)
def test_choices_see_no_other_sequence(name):
    """Gradients are of what was attended to: none is another sequence's."""
    q, k, v = packed_inputs(4, 2, TOKENS, 64)
    ends = ENDS["empty"]
    out = sparse_attention_varlen(q, k, v, sums(ends), CHOICES[name])
    for begin, end in zip(ends, ends[1:]):
        gradients = torch.autograd.grad(out[begin:end].square().sum(), (q, k, v), retain_graph=True)
        for x in gradients:
            others = x.clone()
            others[begin:end] = 0
            assert (others == 0).all()
        assert begin == end or gradients[2].abs().sum() > 0


@pytest.mark.parametrize("name", ["dense", "moba", "xattention"])
def test_a_sequence_on_an_edge_of_blocks_is_as_alone(name):
    q, k, v = packed_inputs(4, 2, 640, 64)
    blocks, ends = CHOICES.get(name), (0, 128, 128, 384, 640)
    out, lse = sparse_attention_varlen(q, k, v, sums(ends), blocks, return_lse=True)
    gradients = torch.autograd.grad((out.square().sum(), lse.sum()), (q, k, v))
    for begin, end in ((0, 128), (128, 384), (384, 640)):
        alone = [x[begin:end].detach().requires_grad_() for x in (q, k, v)]
        out_alone, lse_alone = sparse_attention(*(x.transpose(0, 1).unsqueeze(0) for x in alone), blocks, return_lse=True)
        assert error(out[begin:end], out_alone[0].transpose(0, 1)) < TOLERANCE
        assert error(lse[:, begin:end], lse_alone[0]) < TOLERANCE
        wanted = torch.autograd.grad((out_alone.square().sum(), lse_alone.sum()), alone)
        for actual, expected in zip(gradients, wanted):
            assert error(actual[begin:end], expected) < TOLERANCE


def test_strides_and_documents_made_beforehand():
    qkv = torch.randn(TOKENS, 8, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    q, k, v = qkv.split([4, 2, 2], 1)
    cu_seqlens = sums(ENDS["several"])
    expected = sparse_attention_varlen(*(x.contiguous() for x in (q, k, v)), cu_seqlens)
    assert torch.equal(sparse_attention_varlen(q, k, v, cu_seqlens), expected)
    once = kernels.documents_from_lengths(cu_seqlens, TOKENS)
    assert torch.equal(sparse_attention_varlen(q, k, v, once), expected)
    scaled = sparse_attention_varlen(q * 2, k, v, once, scale=0.5 * 64**-0.5, deterministic=True)
    assert error(scaled, expected) < 2e-2


COMPILED = {"dense": {}, "moba": {"blocks": CHOICES["moba"]}, "vertical_slash": {"blocks": CHOICES["vertical_slash"]},
            "window": {"blocks": kernels.SlidingWindow(100)}, "full": {"mask": "full"}}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(name, dynamic):
    torch._dynamo.reset()

    def attend(q, k, v, cu_seqlens):
        out, lse = sparse_attention_varlen(q, k, v * 2, cu_seqlens, return_lse=True, deterministic=True, **COMPILED[name])
        return out * lse.sigmoid().T.unsqueeze(-1).to(out.dtype)

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens, ends in ((TOKENS, ENDS["several"]), (200, (0, 90, 90, 200))):
        q, k, v = packed_inputs(4, 2, tokens, 64)
        expected, actual = attend(q, k, v, sums(ends)), compiled(q, k, v, sums(ends))
        assert error(actual, expected) < (1e-2 if CUDA else 1e-6)
        d_out = torch.randn_like(expected)
        for a, b in zip(torch.autograd.grad(actual, (q, k, v), d_out), torch.autograd.grad(expected, (q, k, v), d_out)):
            assert error(a, b) < (1e-2 if CUDA else 1e-6)


@pytest.mark.skipif(not CUDA, reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("name", COMPILED)
def test_cuda_graph_of_other_sequences(name):
    """A replay takes the lengths that lie in cu_seqlens then, and nothing waits for them."""
    q, k, v = packed_inputs(4, 2, TOKENS, 64)
    cu_seqlens, others = sums((0, 100, 150, 300)), sums((0, 0, 290, 300))

    def step():
        out = sparse_attention_varlen(q, k, v, cu_seqlens, deterministic=True, **COMPILED[name])
        return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    cu_seqlens.copy_(others)
    graph.replay()
    for actual, expected in zip(captured, step()):
        assert torch.equal(actual, expected)


def call(cu_seqlens=ENDS["several"], q=None, k=None, v=None, **arguments):
    given = [new if new is not None else x.detach() for new, x in zip((q, k, v), packed_inputs(4, 2, TOKENS, 64))]
    return sparse_attention_varlen(*given, sums(cu_seqlens) if type(cu_seqlens) is tuple else cu_seqlens, **arguments)


REFUSED = {
    "int64": (lambda: call(sums((0, 300), torch.int64)), "cu_seqlens is torch.int64 .2.; .* int32 .* cu_seqlens.to"),
    "floats": (lambda: call(sums((0, 300), torch.float32)), "cu_seqlens is torch.float32"),
    "a list": (lambda: call([0, 300]), "cu_seqlens is a list; it must be int32"),
    "nothing": (lambda: call(None), "cu_seqlens is a NoneType"),
    "elsewhere": (lambda: call(sums((0, 300)).to("meta")), "cu_seqlens is on meta and q on .*; move it"),
    "no sequences": (lambda: call(sums((0,))), r"cu_seqlens is \[1\]; it must be \[documents \+ 1\]"),
    "two dimensions": (lambda: call(sums(((0, 300),))), r"cu_seqlens is \[1, 2\]"),
    "documents of others": (lambda: call(kernels.documents_from_lengths(sums((0, 200)), 200)),
                            r"cu_seqlens are documents of \[1, 200\] tokens; with this q they must be \[1, 300\]"),
    "a batch": (lambda: call(q=torch.zeros(1, TOKENS, 4, 64)), r"q is .* \[1, 300, 4, 64\]; it must be \[tokens, heads, head_dim\]"),
    "other keys": (lambda: call(k=torch.zeros(299, 2, 64)), "k has 299 tokens and q 300"),
    "heads before tokens": (lambda: call(v=torch.zeros(2, TOKENS, 64)), "v has 2 tokens and q 300"),
    "no heads": (lambda: call(k=torch.zeros(TOKENS, 64)), r"k is .* \[300, 64\]; it must be \[tokens, kv_heads, head_dim\]"),
    "a mask of other tokens": (lambda: call(mask=kernels.key_intervals("causal", 299, device=DEVICE)), "mask has rows of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    wrong, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=message):
        wrong()


@pytest.mark.skipif(CUDA, reason="a GPU's assertion ends its process's use of it")
@pytest.mark.parametrize("ends", [(1, 300), (0, 200, 100, 300), (0, 299), (0, 301), (0, -5, 300), (37, 27, 236)])
def test_values_are_refused(ends):
    with pytest.raises(RuntimeError, match="cu_seqlens must be sums of lengths, which ascend from 0 to tokens: F.pad"):
        call(ends)
    torch._dynamo.reset()
    compiled = torch.compile(sparse_attention_varlen, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="cu_seqlens must be sums of lengths"):
        compiled(*packed_inputs(4, 2, TOKENS, 64), sums(ends))
