"""The registered operators: under torch.compile and CUDA graphs, without waiting, and what they refuse by name."""

import pytest
import torch
from oracle import CUDA, DEVICE, document_ids, error, inputs, random_tiles
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from ringleader import kernels
from ringleader.kernels import sparse_attention
from ringleader.kernels.blocks import CSR, KEY_GROUPS, UNMASKED_CSR
from ringleader.kernels.operators import ops


def test_a_second_derivative_is_refused():
    q, k, v = inputs(1, 2, 2, 64, 64)
    (dq,) = torch.autograd.grad(sparse_attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_backward"):
        dq.sum().backward()


def operator_samples():
    q, k, v = inputs(2, 4, 2, 200, 64)
    kept = random_tiles(2, 4, 200, 64)
    starts = kernels.documents_from_ids(document_ids(2, 200)).starts
    pattern, lists, others = kernels.tiles_from_mask(kept, tokens=200, tile=64).visit()
    arguments = (pattern, lists, starts, None, others["tile"], 0, 0, 0.0, 0.125, False)
    mask = kernels.key_intervals("full_window", 200, window=70, device=DEVICE).of(2, 200)
    _, unmasked, _ = kernels.tiles_from_mask(kept[..., :3, :3].contiguous(), tokens=192, tile=64, causal=False).visit()
    shorter = (x.detach()[:, :, :192].requires_grad_() for x in (q, k, v))
    positions = torch.arange(184, 200, device=DEVICE)
    with torch.no_grad():
        out, lse = ops.attention(q, k, v, *arguments)
        moba = kernels.Moba(block_size=64, topk_blocks=2, tile=64)(q, k, documents=document_ids(2, 200))
        groups = kernels.KeyGroups(density=0.3)(q, k, documents=document_ids(2, 200))
        chosen = ops.choose_moba(q, k, starts, 64, 64, 2, 0.0)[0]
    return {
        "attention": (q, k, v, *arguments),
        "attention_output": (q, k, v, *arguments),
        "attention of gathered queries": (q, k, v, CSR, [*moba.lists[:4], moba.queries], starts, None, 64, 64, 2),
        "attention of key groups": (q, k, v, KEY_GROUPS, list(groups[:3]), starts, None, 64, 0, 0, 0.3),
        "attention without a mask": (*shorter, UNMASKED_CSR, unmasked, None, None, 64),
        "attention of intervals": (q, k, v, pattern, lists, None, mask, others["tile"]),
        "attention_backward": (torch.randn_like(out), None, q.detach(), k.detach(), v.detach(), out, lse, *arguments),
        "tile_lists": (chosen, 200, 64, 64, 2 * 4 * 10),
        "spread_positions": (q.detach(), 16),
        "choose_vertical_slash": (q.detach(), k.detach(), positions, None, 64, 0.125, 0.9, 0.9, 40, 3, 0.0, 4, 1),
        "choose_moba": (q.detach(), k.detach(), starts, 64, 64, 2, 0.0),
        "choose_xattention": (q.detach(), k.detach(), starts, 64, 16, 0.125, 0.9, 0.0),
        "choose_key_groups": (q.detach(), k.detach(), starts, 0.125, 0.3),
    }


@pytest.mark.parametrize("name", ["attention", "attention_output", "attention of gathered queries",
                                  "attention of key groups", "attention without a mask", "attention of intervals",
                                  "attention_backward", "tile_lists", "spread_positions", "choose_vertical_slash", "choose_moba",
                                  "choose_xattention", "choose_key_groups"])
def test_opcheck(name):
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    operator, *_ = name.split()
    if operator in ("attention", "attention_output") and not CUDA:  # on GPUs two runs differ in their last bits
        checks.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(ops, operator).default, operator_samples()[name], test_utils=checks)


FORMS = {
    "dense": lambda: None,
    "window": lambda: kernels.SlidingWindow(100),
    "tiles": lambda: kernels.tiles_from_mask(random_tiles(2, 4, 300, 64), tokens=300, tile=64),
    "moba": lambda: kernels.Moba(block_size=64, topk_blocks=2, tile=64),
    "vertical_slash": lambda: kernels.VerticalSlash(estimate_queries=16, estimate_at="spread", max_columns=20,
                                                    sink_tokens=4, max_diagonals=2, tile=64),
    "xattention": lambda: kernels.XAttention(density=0.5, tile=64),
    "key_groups": lambda: kernels.KeyGroups(density=0.5),
    "intervals": lambda: kernels.tiles_from_mask(random_tiles(2, 4, 300, 64), tokens=300, tile=64),
}


def has_order(name):
    """Whether gradients have the same bits every time: those of key groups have not, on GPUs."""
    return not CUDA or name != "key_groups"


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(name, dynamic):
    torch._dynamo.reset()
    blocks, arguments = FORMS[name](), {"documents": document_ids(2, 300)}
    if name == "intervals":
        arguments = {"mask": kernels.key_intervals("shared_question", 300, **arguments)}

    def attend_twice(q, k, v):
        out, lse = sparse_attention(q, k, v * 2, blocks, return_lse=True, deterministic=has_order(name), **arguments)
        return out * lse.sigmoid().unsqueeze(-1).to(out.dtype)

    backend = "inductor" if CUDA and name == "vertical_slash" and not dynamic else "aot_eager"
    compiled = torch.compile(attend_twice, fullgraph=True, dynamic=dynamic, backend=backend)
    q, k, v = inputs(2, 4, 2, 300, 64)
    expected, actual = attend_twice(q, k, v), compiled(q, k, v)
    assert error(actual, expected) < (1e-2 if CUDA else 1e-6)
    d_out = torch.randn_like(expected)
    for a, b in zip(torch.autograd.grad(actual, (q, k, v), d_out), torch.autograd.grad(expected, (q, k, v), d_out)):
        assert error(a, b) < (1e-2 if CUDA else 1e-6)


@pytest.mark.parametrize("name, strict", [("dense", False), ("window", False), ("key_groups", True)])
def test_export_of_any_length(name, strict):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return sparse_attention(q, k, v, FORMS[name]())

    q, k, v = (x.detach() for x in inputs(2, 4, 2, 300, 64))
    tokens = {2: torch.export.Dim("tokens", min=128, max=65536)}
    exported = torch.export.export(Attention(), (q, k, v), dynamic_shapes={"q": tokens, "k": tokens, "v": tokens},
                                   strict=strict).module()
    longer = [torch.cat([x, x], 2) for x in (q, k, v)]
    assert torch.equal(exported(*longer), sparse_attention(*longer, FORMS[name]()))


@pytest.mark.parametrize("name", FORMS)
def test_traced_integers_have_32_bits(name):
    """Inductor multiplies what torch.arange counts in 32 bits, and Triton refuses longer factors there."""
    torch._dynamo.reset()
    blocks = FORMS[name]()
    scalars = []

    def backend(graph, _):
        for node in graph.graph.nodes:
            scalars.extend(x for x in (*node.args, *node.kwargs.values()) if isinstance(x, int))
        return graph.forward

    torch.compile(lambda q, k, v: sparse_attention(q, k, v, blocks), fullgraph=True, backend=backend)(*inputs(2, 4, 2, 300, 64))
    assert scalars and all(abs(x) < 2**31 for x in scalars), scalars


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled):
    """Float32 under autocast is bfloat16, forward and backward, and gradients come back in float32."""
    torch._dynamo.reset()
    q, k, v = inputs(1, 4, 2, 300, 64, dtype=torch.float32)

    def attend(q, k, v):
        with torch.autocast(DEVICE, torch.bfloat16):
            return sparse_attention(q, k, v.bfloat16(), kernels.SlidingWindow(100))

    call = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    out = call(q, k, v)
    expected = sparse_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), kernels.SlidingWindow(100))
    assert out.dtype == torch.bfloat16 and error(out, expected) < (1e-2 if CUDA else 1e-6)
    d_out = torch.randn_like(expected)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), d_out), torch.autograd.grad(expected, (q, k, v), d_out)):
        assert a.dtype == torch.float32 and error(a, b) < (1e-2 if CUDA else 1e-6)


class Calls(TorchDispatchMode):
    """Remembers the arguments of each operator."""

    def __init__(self):
        super().__init__()
        self.arguments = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.arguments[func.name()] = args
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("of_pytorch", [False, True])
def test_what_decides_whether_gradients_are_deterministic(asked, of_pytorch):
    q, k, v = inputs(1, 2, 2, 64, 64)
    torch.use_deterministic_algorithms(of_pytorch)
    try:
        out = sparse_attention(q, k, v, deterministic=asked)
    finally:
        torch.use_deterministic_algorithms(False)
    with Calls() as calls:
        out.sum().backward()
    assert calls.arguments["ringleader::attention_backward"][-1] is (of_pytorch if asked is None else asked)


@pytest.mark.skipif(not CUDA, reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("name", FORMS)
def test_cuda_graph(name):
    blocks, arguments = FORMS[name](), {"documents": document_ids(2, 300)}
    if name == "intervals":
        arguments = {"mask": kernels.key_intervals("shared_question", 300, **arguments)}
    q, k, v = inputs(2, 4, 2, 300, 64)

    def step():
        out = sparse_attention(q, k, v, blocks, deterministic=has_order(name), **arguments)
        return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for x, y in zip((q, k, v), inputs(2, 4, 2, 300, 64, seed=1)):
        x.data.copy_(y.data)
    graph.replay()
    for actual, expected in zip(captured, step()):
        assert torch.equal(actual, expected) if has_order(name) else error(actual, expected) < 1e-2


@pytest.mark.skipif(not CUDA, reason="the host waits for nothing on the CPU")
@pytest.mark.parametrize("name", FORMS)
def test_no_wait(name):
    ids = document_ids(2, 300)
    kept = random_tiles(2, 1, 300, 128)
    counts, indices = kept.sum(-1), kept.int().argsort(-1, descending=True)
    q, k, v = inputs(2, 4, 2, 300, 64)
    blocks = FORMS[name]()
    cu_seqlens, positions = torch.tensor([0, 37, 300]).to(DEVICE), torch.tensor([7, 290]).to(DEVICE).expand(2, 4, 2)
    all_diagonals = torch.ones(2, 4, 3, dtype=torch.bool, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        columns = kernels.selected_columns(positions, torch.full((2, 4), 2, device=DEVICE), tokens=300)
        sparse_attention(q, k, v, kernels.block_diagonals(all_diagonals), columns=columns,
                         documents=kernels.documents_from_lengths(cu_seqlens, 300))
        for form in (blocks, (counts, indices)):
            out = sparse_attention(q, k, v, form, documents=ids)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        for mask_name in ("full_documents", "shared_question"):
            mask = kernels.key_intervals(mask_name, 300, documents=ids)
            lists = kernels.tiles_from_mask(kept.expand(2, 4, -1, -1), tokens=300, causal=mask.causal)
            torch.autograd.grad(sparse_attention(q, k, v, lists, mask=mask), (q, k, v), torch.ones_like(q))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def error_cases():
    q, k, v = inputs(2, 4, 2, 300, 64)
    kept = random_tiles(2, 4, 300, 64)
    lists = kernels.tiles_from_mask(kept, tokens=300, tile=64)
    diagonals = kernels.block_diagonals(torch.ones(2, 4, 5, dtype=torch.bool, device=DEVICE), tile=64)
    columns = kernels.selected_columns(torch.zeros(2, 4, 1, dtype=torch.int64, device=DEVICE),
                                       torch.ones(2, 4, dtype=torch.int64, device=DEVICE), tokens=300)
    short = [x[:, :, :200] for x in (q, k, v)]
    return [
        (lambda: sparse_attention(q[0], k, v), "q is .*must be .batch, heads, tokens, head_dim"),
        (lambda: sparse_attention(q, k[:, :, :100], v[:, :, :100]), "k is .*no key-value cache"),
        (lambda: sparse_attention(q[:, :3], k, v), "multiple"),
        (lambda: sparse_attention(q, k, v[:, :1]), "v is"),
        (lambda: sparse_attention(q.double(), k.double(), v.double()), "q is Double.*bfloat16"),
        (lambda: sparse_attention(q, k, v, mask="window"), "mask is 'window'; it may be 'causal', 'full'"),
        (lambda: sparse_attention(q, k, v, mask=torch.ones(300, 300)), "mask is a Tensor"),
        (lambda: sparse_attention(*short, diagonals, mask="full"), "5 diagonals of 64 x 64 tokens; q's 200 tokens have 4"),
        (lambda: sparse_attention(q, k, v, kernels.Moba(block_size=64, tile=64)(q, k), mask="full"),
         "blocks is a QueryBlocks"),
        (lambda: sparse_attention(q, k, v, lists, mask="full"), "blocks lists no tiles ahead.*causal=False"),
        (lambda: sparse_attention(q, k, v, mask=kernels.key_intervals("causal", 299, device=DEVICE)), "int32 .2, 300, 4."),
        (lambda: sparse_attention(q, k, v, mask=kernels.key_intervals("causal", 300, device=DEVICE),
                                  documents=document_ids(2, 300)), "documents beside a mask of intervals"),
        (lambda: sparse_attention(q, k, v, diagonals, columns=columns, mask="full"), "columns go with mask='causal'"),
        (lambda: sparse_attention(q, k, v, diagonals._replace(columns=columns), mask="full"), "columns go with mask='causal'"),
        (lambda: sparse_attention(q, k, v, kernels.KeyGroups(), mask="full"), "blocks is a KeyGroups"),
        (lambda: sparse_attention(q, k, v, kernels.SlidingWindow(5), documents=document_ids(2, 300),
                                  mask=kernels.key_intervals("full", 300, device=DEVICE)), "documents beside a mask"),
        (lambda: kernels.key_intervals("sliding", 300), "name is 'sliding'; masks are full, causal"),
        (lambda: kernels.key_intervals("full_window", 300, window=0), "window is 0"),
        (lambda: kernels.key_intervals("full_documents", 300), "full_documents needs documents"),
        (lambda: kernels.key_intervals("full", 300, documents=document_ids(2, 300)), "full does not look at documents"),
        (lambda: kernels.tiles_from_edges(kept, [0, 64, 100, 192, 256], [0, 64, 128, 192, 256], tokens=300),
         "query_edges is .*multiples of 64"),
        (lambda: sparse_attention(q, k, v, "moba"), "blocks is a str"),
        (lambda: sparse_attention(*short, lists), "blocks.row_offsets must be"),
        (lambda: sparse_attention(q, k, v, documents=torch.zeros(2, 299, dtype=torch.int64, device=DEVICE)),
         "documents are of .2, 299. tokens"),
        (lambda: sparse_attention(q, k, v, documents=torch.zeros(2, 300, device=DEVICE)), "must be integers"),
        (lambda: sparse_attention(q, k, v, documents=[0, 1]), "documents is a list"),
        (lambda: sparse_attention(q, k, v, lists, columns=columns), "columns go with blocks=block_diagonals"),
        (lambda: sparse_attention(q, k, v, diagonals, columns=(1, 2)), "columns is a tuple"),
        (lambda: kernels.tiles_from_mask(kept, tokens=600, tile=64), "mask is .*must be bool"),
        (lambda: kernels.tiles_from_mask(kept, tokens=300, tile=32), "tile is 32"),
        (lambda: kernels.tiles_from_lists(kept.sum(-1), kept.sum(-1), tokens=300, heads=4), "counts is"),
        (lambda: kernels.tiles_from_lists(kept.sum(-1), kept, tokens=300, heads=4, block_size=100), "block_size is 100"),
        (lambda: kernels.tiles_from_lists(kept.sum(-1), kept, tokens=300, heads=8, batch=2, block_size=64),
         "counts has 4 for heads"),
        (lambda: kernels.Moba(block_size=100)(q, k), "block_size is 100"),
        (lambda: kernels.Moba(topk_blocks=0)(q, k), "topk_blocks is 0"),
        (lambda: kernels.Moba(block_size=2**32)(q, k), "block_size is 4294967296"),
        (lambda: sparse_attention(q, k, v, kernels.Moba(block_size=64, tile=64)(q, k)._replace(topk_blocks=-1)),
         "blocks.topk_blocks is -1"),
        (lambda: kernels.XAttention(stride=5)(q, k), "stride is 5"),
        (lambda: kernels.XAttention(threshold=0.0)(q, k), "threshold is 0"),
        (lambda: kernels.VerticalSlash(estimate_at="start")(q, k), "estimate_at is 'start'"),
        (lambda: kernels.VerticalSlash(estimate_at="end")(q, k, documents=torch.zeros(1, 300, dtype=torch.int64, device=DEVICE)),
         "estimate_at is 'end' beside documents"),
        (lambda: kernels.VerticalSlash(column_mass=1.5)(q, k), "column_mass"),
        (lambda: kernels.VerticalSlash(estimate_queries=500)(q, k), "estimate_queries"),
        (lambda: kernels.documents_from_lengths(torch.zeros(2, 2), 4), "cu_seqlens is"),
    ]


@pytest.mark.parametrize("number", range(44))
def test_errors_name_the_argument(number):
    cases = error_cases()
    assert len(cases) == 44
    call, message = cases[number]
    with pytest.raises((RuntimeError, ValueError, TypeError, NotImplementedError), match=message):
        call()


@pytest.mark.skipif(CUDA, reason="a GPU's assertion ends its process's use of it")
def test_values_that_lists_must_not_have():
    with pytest.raises(RuntimeError, match="indices of listed blocks must lie in .0, 3"):
        kernels.tiles_from_lists(torch.ones(3, dtype=torch.int32), torch.full((3, 1), 3), tokens=300, heads=1)
    for positions in ([5, 5], [0, 300], [-1, 4]):
        with pytest.raises(RuntimeError, match="positions must differ"):
            kernels.selected_columns(torch.tensor([[positions]]), torch.tensor([[2]]), tokens=300)


def test_block_mask_inside_compile_is_refused():
    q, k, v = inputs(1, 2, 2, 256, 64)
    block_mask = create_block_mask(lambda b, h, q, kv: kv <= q, None, None, 256, 256, device=DEVICE)
    with pytest.raises(Exception, match="tiles_from_block_mask"):
        torch.compile(lambda: sparse_attention(q, k, v, block_mask), backend="eager", fullgraph=True)()
