"""sparse_attention, forward and backward, against float64, for everything that it takes as blocks."""

import pytest
import torch
from oracle import CUDA, DEVICE, causal, check, error, inputs, oracle, pairs_of_tiles, same_document
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from ringleader import kernels
from ringleader.kernels import masks, sparse_attention
from ringleader.kernels.operators import ops


def attend(blocks=None, **arguments):
    return lambda q, k, v: sparse_attention(q, k, v, blocks, return_lse=True, **arguments)


def random_tiles(batch, heads, tokens, tile, density=0.4, seed=3):
    tiles = -(-tokens // tile)
    kept = torch.rand(batch, heads, tiles, tiles, generator=torch.Generator().manual_seed(seed)) < density
    return kept.to(DEVICE)


def document_ids(batch, tokens):
    """Documents of different lengths, whose ends lie inside tiles and on their edges."""
    ids = torch.zeros(batch, tokens, dtype=torch.int64, device=DEVICE)
    for b in range(batch):
        for first in (37, 64, 65, 200 + b, 256):
            ids[b, first:] += 1
    return ids


@pytest.mark.parametrize("tokens", [1, 63, 128, 300])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(4, 2, 64), (3, 1, 128)])
def test_dense(tokens, heads, kv_heads, head_dim):
    check(attend(), *inputs(2, heads, kv_heads, tokens, head_dim), causal(tokens))


@pytest.mark.parametrize("window", [1, 64, 100])
def test_window(window):
    pairs = causal(300) & ~causal(300).tril(-window)
    check(attend(kernels.SlidingWindow(window)), *inputs(2, 4, 2, 300, 64), pairs)


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("tokens", [300, 512])
@pytest.mark.parametrize("documents", [False, True])
def test_tiles(tile, tokens, documents):
    kept = random_tiles(2, 4, tokens, tile)
    kept[0, 1] = False  # a head that sees nothing
    kept[1, 2, 1] = False  # and a row
    blocks = kernels.tiles_from_mask(kept, tokens=tokens, tile=tile)
    pairs = pairs_of_tiles(kept, tokens, tile) & causal(tokens)
    ids = document_ids(2, tokens) if documents else None
    if documents:
        pairs = pairs & same_document(ids)
    check(attend(blocks, documents=ids), *inputs(2, 4, 2, tokens, 64), pairs)


def test_dense_documents():
    ids = document_ids(2, 300)
    check(attend(documents=ids), *inputs(2, 4, 2, 300, 128), causal(300) & same_document(ids))


def test_lists():
    tokens, kept = 300, random_tiles(2, 1, 300, 128)
    counts = kept.sum(-1)
    indices = kept.int().argsort(-1, descending=True)
    pairs = pairs_of_tiles(kept, tokens, 128) & causal(tokens)
    check(attend((counts.int(), indices.int())), *inputs(2, 4, 2, tokens, 64), pairs)
    shared = attend((counts[0, 0], indices[0, 0]))  # of all sequences and heads
    check(shared, *inputs(2, 4, 2, tokens, 64), pairs[:1])


@pytest.mark.parametrize("block_size", [(128, 64), (64, 192), (256, 128)])
def test_lists_of_other_blocks(block_size):
    tokens = 500
    rows, blocks = -(-tokens // block_size[0]), -(-tokens // block_size[1])
    kept = torch.rand(1, 4, rows, blocks, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.5
    full = torch.rand(1, 4, rows, blocks, generator=torch.Generator().manual_seed(2)).to(DEVICE) < 0.2
    lists = kernels.tiles_from_lists(
        kept.sum(-1), kept.int().argsort(-1, descending=True), tokens=tokens, heads=4, block_size=block_size,
        full_counts=full.sum(-1), full_indices=full.int().argsort(-1, descending=True))
    pairs = (kept | full).repeat_interleave(block_size[0], 2).repeat_interleave(block_size[1], 3)
    check(attend(lists), *inputs(1, 4, 4, tokens, 64), pairs[..., :tokens, :tokens] & causal(tokens))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("with_columns", [False, True])
def test_diagonals(with_columns, documents):
    tokens, tile = 300, 64
    kept = torch.rand(2, 4, 5, generator=torch.Generator().manual_seed(5)).to(DEVICE) < 0.3
    row = torch.arange(5, device=DEVICE)
    delta = row.unsqueeze(1) - row
    tiles = (kept[..., delta.clamp(min=0)] | (delta == 0)) & (delta >= 0)
    pairs = pairs_of_tiles(tiles, tokens, tile)
    columns = None
    if with_columns:
        positions = torch.tensor([7, 290, 64, 130, 2]).to(DEVICE).expand(2, 4, 5)
        counts = torch.tensor([[5, 3, 0, 1], [2, 5, 4, 4]]).to(DEVICE)
        columns = kernels.selected_columns(positions, counts, tokens=tokens)
        for b, h in torch.cartesian_prod(torch.arange(2), torch.arange(4)).tolist():
            pairs[b, h, :, positions[b, h, : counts[b, h]]] = True
    pairs = pairs & causal(tokens)
    ids = document_ids(2, tokens) if documents else None
    if documents:
        pairs = pairs & same_document(ids)
    check(attend(kernels.block_diagonals(kept, tile=tile), columns=columns, documents=ids),
          *inputs(2, 4, 2, tokens, 64), pairs)


def test_strides_scale_and_bfloat16():
    q, k, v = inputs(2, 4, 2, 200, 64, dtype=torch.bfloat16)
    check(attend(), q, k, v, causal(200), tolerance=2e-2)
    dense = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    assert torch.equal(sparse_attention(*dense), sparse_attention(q, k, v))
    packed = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], -1).detach()
    parts = [x.unflatten(-1, (-1, 64)).transpose(1, 2) for x in packed.split([256, 128, 128], -1)]
    assert torch.equal(sparse_attention(*parts), sparse_attention(q, k, v))
    halved, _ = oracle(*(x.detach().double() for x in (q, k, v)), causal(200), scale=0.05)
    assert error(sparse_attention(q, k, v, scale=0.05), halved) < 2e-2
    # A gradient without strides of its own.
    torch.autograd.grad(sparse_attention(q, k, v).sum(), q)[0].isfinite().all()


def sample_masks(tokens):
    kept = random_tiles(2, 4, tokens, 128)

    def listed(b, h, q, kv):
        return kept[b, h, q // 128, kv // 128] & (kv <= q)

    return {"causal": (lambda b, h, q, kv: kv <= q, None, None), "listed": (listed, 2, 4)}


@pytest.mark.parametrize("name", ["causal", "listed"])
@pytest.mark.parametrize("tokens", [384, 512])
def test_block_mask(name, tokens):
    mask_mod, batch, heads = sample_masks(tokens)[name]
    block_mask = create_block_mask(mask_mod, batch, heads, tokens, tokens, device=DEVICE)
    pairs = create_mask(mask_mod, batch, heads, tokens, tokens, device=DEVICE)
    check(attend(block_mask), *inputs(2, 4, 2, tokens, 64), pairs)


def test_block_mask_of_documents():
    ids = document_ids(2, 512)

    def mask_mod(b, h, q, kv):
        return (kv <= q) & (ids[b, q] == ids[b, kv])

    block_mask = create_block_mask(mask_mod, 2, None, 512, 512, device=DEVICE)
    q, k, v = inputs(2, 4, 2, 512, 64)
    check(attend(block_mask, documents=ids), q, k, v, causal(512) & same_document(ids))
    # Without the argument they are intervals of keys.
    check(attend(block_mask), q, k, v, causal(512) & same_document(ids))


def visible_of(name, tokens, starts, window, prefix, block):
    """[batch, tokens, tokens] by the definition; starts: [batch, tokens]"""
    i = torch.arange(tokens, device=DEVICE).view(1, -1, 1)
    j = torch.arange(tokens, device=DEVICE).view(1, 1, -1)
    start, start_of_key = starts.unsqueeze(2), starts.unsqueeze(1)
    own = start == start_of_key
    near = (i - j).abs() < window
    question = start_of_key == 0
    second = torch.where(starts > 0, starts, tokens).min(1).values.view(-1, 1, 1)  # the first answer
    return {
        "full": i >= 0,
        "causal": j <= i,
        "full_window": near,
        "causal_window": near & (j <= i),
        "full_documents": own,
        "causal_documents": own & (j <= i),
        "shared_question": (own | question | ((start == second) & (start_of_key <= second))) & (j <= i),
        "causal_blockwise": (own | (start == starts[:, -1:].unsqueeze(2))) & (j <= i),
        "global_sliding": near | (j < window) | (i < window),
        "prefix_causal": (j <= i) | (j < prefix),
        "prefix_documents": own & ((j <= i) | (j < start + prefix)),
        "block_causal_documents": own & ((j - start) // block <= (i - start) // block),
    }[name].expand(starts.shape[0], tokens, tokens)


OF_DOCUMENTS = ("full_documents", "causal_documents", "shared_question", "causal_blockwise", "prefix_documents",
                "block_causal_documents")


@pytest.mark.parametrize("name", masks.NAMES)
@pytest.mark.parametrize("tokens", [300, 512])
def test_masks(name, tokens):
    ids = document_ids(2, tokens)
    starts = kernels.documents_from_ids(ids).starts.long()
    visible = visible_of(name, tokens, starts, 40, 70, 50)
    mask = kernels.key_intervals(name, tokens, documents=ids if name in OF_DOCUMENTS else None, window=40, prefix=70,
                                 block=50, device=DEVICE)
    assert not mask.causal or not (visible & ~causal(tokens)).any()
    rows = mask.rows.long().expand(2, -1, -1).unsqueeze(2)
    j = torch.arange(tokens, device=DEVICE)
    in_rows = ((rows[..., 0] <= j) & (j < rows[..., 1])) | ((rows[..., 2] <= j) & (j < rows[..., 3]))
    assert torch.equal(in_rows, visible)
    assert (rows[..., 1:] >= rows[..., :-1]).all()
    check(attend(mask=mask), *inputs(2, 4, 2, tokens, 64), visible.unsqueeze(1))
    kept = random_tiles(2, 4, tokens, 64)
    kept[0, 1, 2] = False
    blocks = kernels.tiles_from_mask(kept, tokens=tokens, tile=64, causal=mask.causal)
    check(attend(blocks, mask=mask), *inputs(2, 4, 2, tokens, 64),
          visible.unsqueeze(1) & pairs_of_tiles(kept, tokens, 64))


def test_full():
    everything = torch.ones(300, 300, dtype=torch.bool, device=DEVICE)
    check(attend(mask="full"), *inputs(2, 4, 2, 300, 64), everything)
    ids = document_ids(2, 300)
    check(attend(mask="full", documents=ids), *inputs(2, 4, 2, 300, 128), same_document(ids))
    kept = random_tiles(2, 1, 300, 128)
    lists = kept.sum(-1), kept.int().argsort(-1, descending=True)
    check(attend(lists, mask="full"), *inputs(2, 4, 2, 300, 64), pairs_of_tiles(kept, 300, 128))


def test_prefixes_of_the_data():
    ids = document_ids(2, 300)
    starts = kernels.documents_from_ids(ids).starts.long()
    prefix = torch.tensor([[30], [90]], device=DEVICE)
    mask = kernels.key_intervals("prefix_documents", 300, documents=ids, prefix=prefix)
    visible = torch.cat([visible_of("prefix_documents", 300, starts[b : b + 1], 1, prefix[b].item(), 1) for b in (0, 1)])
    check(attend(mask=mask), *inputs(2, 4, 2, 300, 64), visible.unsqueeze(1))


def test_queries_without_a_key():
    visible = torch.zeros(1, 300, 300, dtype=torch.bool, device=DEVICE)
    visible[0, 10:40, 5:260] = visible[0, 200:210, 290:] = visible[0, 200:210, :3] = True
    check(attend(mask=kernels.intervals_of_mask(visible)), *inputs(1, 4, 2, 300, 64), visible.unsqueeze(1))


@pytest.mark.parametrize("causal_lists", [False, True])
def test_blocks_of_different_sizes(causal_lists):
    tokens, query_edges, key_edges = 700, [0, 64, 256, 448], [0, 192, 256, 512, 640]
    kept = torch.rand(1, 4, 4, 5, generator=torch.Generator().manual_seed(4)).to(DEVICE) < 0.5
    blocks = kernels.tiles_from_edges(kept, query_edges, key_edges, tokens=tokens, causal=causal_lists)
    of_query, of_key = (torch.bucketize(torch.arange(tokens), torch.tensor(edges), right=True).to(DEVICE) - 1
                        for edges in (query_edges, key_edges))
    pairs = kept[:, :, of_query][..., of_key]
    if causal_lists:
        check(attend(blocks), *inputs(1, 4, 2, tokens, 64), pairs & causal(tokens))
    else:
        check(attend(blocks, mask="full"), *inputs(1, 4, 2, tokens, 64), pairs)


def interval_mask_mods(tokens):
    kept = random_tiles(2, 4, tokens, 128)
    prefix = torch.tensor([100, 300], device=DEVICE)
    return {
        "full": lambda b, h, q, kv: q >= 0,
        "window": lambda b, h, q, kv: (q - kv).abs() < 50,
        "sinks": lambda b, h, q, kv: (kv <= q) & ((q - kv < 150) | (kv < 4)),
        "prefix": lambda b, h, q, kv: (kv <= q) | (kv < prefix[b]),
        "listed": lambda b, h, q, kv: kept[b, h, q // 128, kv // 128] & ((q - kv).abs() < 200),
    }


@pytest.mark.parametrize("name", ["full", "window", "sinks", "prefix", "listed"])
@pytest.mark.parametrize("tokens", [384, 500])
def test_block_mask_of_intervals(name, tokens):
    mask_mod = interval_mask_mods(tokens)[name]
    block_mask = create_block_mask(mask_mod, 2, 4, tokens, tokens, device=DEVICE)
    pairs = create_mask(mask_mod, 2, 4, tokens, tokens, device=DEVICE)
    check(attend(block_mask), *inputs(2, 4, 2, tokens, 64), pairs)


def test_block_mask_that_is_not_of_intervals_is_refused():
    q, k, v = inputs(1, 2, 2, 256, 64)

    def refused(mask_mod, message, heads=None, **arguments):
        block_mask = create_block_mask(mask_mod, None, heads, 256, 256, device=DEVICE)
        with pytest.raises(NotImplementedError, match=message):
            sparse_attention(q, k, v, block_mask, **arguments)

    refused(lambda b, h, q, kv: kv % 3 == 0, "query 0 keys in 86 runs")
    refused(lambda b, h, q, kv: (q - kv).abs() < 50 + h * 10, "in one head and not in another", heads=2)
    refused(lambda b, h, q, kv: (q - kv).abs() < 50, "beside documents it must be causal", documents=torch.zeros(
        1, 256, dtype=torch.int64, device=DEVICE))


def test_block_mask_without_a_mask_mod():
    q, k, v = inputs(1, 2, 2, 256, 64)
    noop = BlockMask.from_kv_blocks(torch.ones(1, 1, 2, dtype=torch.int32, device=DEVICE),
                                    torch.zeros(1, 1, 2, 2, dtype=torch.int32, device=DEVICE))
    pairs = torch.zeros(256, 256, dtype=torch.bool, device=DEVICE)
    pairs[:, :128] = True
    check(attend(noop), q, k, v, pairs)


def test_deterministic():
    kept = random_tiles(1, 4, 1000, 64)
    blocks = kernels.tiles_from_mask(kept, tokens=1000, tile=64)
    q, k, v = inputs(1, 4, 2, 1000, 64)

    def gradients():
        out = sparse_attention(q, k, v, blocks, deterministic=True)
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    first = gradients()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients()))


def test_a_second_derivative_is_refused():
    q, k, v = inputs(1, 2, 2, 64, 64)
    (dq,) = torch.autograd.grad(sparse_attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_backward"):
        dq.sum().backward()


def operator_samples():
    q, k, v = inputs(2, 4, 2, 200, 64)
    kept = random_tiles(2, 4, 200, 64)
    starts = kernels.documents_from_ids(document_ids(2, 200)).starts
    pattern, lists, tile, size = kernels.tiles_from_mask(kept, tokens=200, tile=64).visit()
    arguments = (pattern, lists, starts, None, tile, size, 0.125, False)
    mask = kernels.key_intervals("full_window", 200, window=70, device=DEVICE).of(2, 200)
    positions = torch.arange(184, 200, device=DEVICE)
    with torch.no_grad():
        out, lse = ops.attention(q, k, v, *arguments)
        chosen = ops.choose_moba(q, k, starts, 64, 64, 2, 0.0)[0]
    return {
        "attention": (q, k, v, *arguments),
        "attention of intervals": (q, k, v, pattern, lists, None, mask, tile, size, 0.125, False),
        "attention_backward": (torch.randn_like(out), None, q.detach(), k.detach(), v.detach(), out, lse, *arguments),
        "tile_lists": (chosen, 200, 64, 64, 2 * 4 * 10),
        "choose_vertical_slash": (q.detach(), k.detach(), positions, None, 64, 0.125, 0.9, 0.9, 40, 3, 0.0, 4, 1),
        "choose_moba": (q.detach(), k.detach(), starts, 64, 64, 2, 0.0),
        "choose_xattention": (q.detach(), k.detach(), starts, 64, 16, 0.125, 0.9, 0.0),
    }


@pytest.mark.parametrize("name", ["attention", "attention of intervals", "attention_backward", "tile_lists", "choose_vertical_slash",
                                  "choose_moba", "choose_xattention"])
def test_opcheck(name):
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    operator, *_ = name.split()
    if operator == "attention" and not CUDA:  # on GPUs two runs differ in their last bits
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
    "intervals": lambda: kernels.tiles_from_mask(random_tiles(2, 4, 300, 64), tokens=300, tile=64),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(name, dynamic):
    torch._dynamo.reset()
    blocks, arguments = FORMS[name](), {"documents": document_ids(2, 300)}
    if name == "intervals":
        arguments = {"mask": kernels.key_intervals("shared_question", 300, **arguments)}

    def attend_twice(q, k, v):
        out, lse = sparse_attention(q, k, v * 2, blocks, return_lse=True, deterministic=True, **arguments)
        return out * lse.sigmoid().unsqueeze(-1).to(out.dtype)

    backend = "inductor" if CUDA and name == "vertical_slash" and not dynamic else "aot_eager"
    compiled = torch.compile(attend_twice, fullgraph=True, dynamic=dynamic, backend=backend)
    q, k, v = inputs(2, 4, 2, 300, 64)
    expected, actual = attend_twice(q, k, v), compiled(q, k, v)
    assert error(actual, expected) < (1e-2 if CUDA else 1e-6)
    d_out = torch.randn_like(expected)
    for a, b in zip(torch.autograd.grad(actual, (q, k, v), d_out), torch.autograd.grad(expected, (q, k, v), d_out)):
        assert error(a, b) < (1e-2 if CUDA else 1e-6)


@pytest.mark.skipif(not CUDA, reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("name", FORMS)
def test_cuda_graph(name):
    blocks, arguments = FORMS[name](), {"documents": document_ids(2, 300)}
    if name == "intervals":
        arguments = {"mask": kernels.key_intervals("shared_question", 300, **arguments)}
    q, k, v = inputs(2, 4, 2, 300, 64)

    def step():
        out = sparse_attention(q, k, v, blocks, deterministic=True, **arguments)
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
        assert torch.equal(actual, expected)


@pytest.mark.skipif(not CUDA, reason="the host waits for nothing on the CPU")
@pytest.mark.parametrize("name", FORMS)
def test_no_wait(name):
    ids = document_ids(2, 300)
    kept = random_tiles(2, 1, 300, 128)
    counts, indices = kept.sum(-1), kept.int().argsort(-1, descending=True)
    q, k, v = inputs(2, 4, 2, 300, 64)
    blocks = FORMS[name]()
    torch.cuda.set_sync_debug_mode("error")
    try:
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
        (lambda: sparse_attention(q, k, v, kernels.SlidingWindow(5), mask="full"), "blocks is a SlidingWindow"),
        (lambda: sparse_attention(q, k, v, diagonals, mask="full"), "blocks is a Diagonals"),
        (lambda: sparse_attention(q, k, v, kernels.Moba(block_size=64, tile=64)(q, k), mask="full"),
         "blocks is a QueryBlocks"),
        (lambda: sparse_attention(q, k, v, lists, mask="full"), "blocks lists no tiles ahead.*causal=False"),
        (lambda: sparse_attention(q, k, v, mask=kernels.key_intervals("causal", 299, device=DEVICE)), "int32 .2, 300, 4."),
        (lambda: sparse_attention(q, k, v, mask=kernels.key_intervals("causal", 300, device=DEVICE),
                                  documents=document_ids(2, 300)), "documents beside a mask of intervals"),
        (lambda: sparse_attention(q, k, v, diagonals, columns=columns, mask="full"), "columns go with mask='causal'"),
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
        (lambda: sparse_attention(q, k, v, kernels.SlidingWindow(0)), "window is 0"),
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
        (lambda: kernels.XAttention(stride=5)(q, k), "stride is 5"),
        (lambda: kernels.XAttention(threshold=0.0)(q, k), "threshold is 0"),
        (lambda: kernels.VerticalSlash(estimate_at="start")(q, k), "estimate_at is 'start'"),
        (lambda: kernels.VerticalSlash(column_mass=1.5)(q, k), "column_mass"),
        (lambda: kernels.VerticalSlash(estimate_queries=500)(q, k), "estimate_queries"),
        (lambda: kernels.documents_from_lengths(torch.zeros(2, 2), 4), "cu_seqlens is"),
    ]


@pytest.mark.parametrize("number", range(40))
def test_errors_name_the_argument(number):
    cases = error_cases()
    assert len(cases) == 40
    call, message = cases[number]
    with pytest.raises((RuntimeError, ValueError, TypeError, NotImplementedError), match=message):
        call()


@pytest.mark.skipif(CUDA, reason="a GPU's assertion ends its process's use of it")
def test_values_that_lists_must_not_have():
    with pytest.raises(RuntimeError, match="indices of listed blocks must be below 3"):
        kernels.tiles_from_lists(torch.ones(3, dtype=torch.int32), torch.full((3, 1), 3), tokens=300, heads=1)
    for positions in ([5, 5], [0, 300], [-1, 4]):
        with pytest.raises(RuntimeError, match="positions must differ"):
            kernels.selected_columns(torch.tensor([[positions]]), torch.tensor([[2]]), tokens=300)


def test_block_mask_inside_compile_is_refused():
    q, k, v = inputs(1, 2, 2, 256, 64)
    block_mask = create_block_mask(lambda b, h, q, kv: kv <= q, None, None, 256, 256, device=DEVICE)
    with pytest.raises(Exception, match="tiles_from_block_mask"):
        torch.compile(lambda: sparse_attention(q, k, v, block_mask), backend="eager", fullgraph=True)()


def test_documents():
    ids = torch.tensor([[4, 4, 2, 2, 2, 4], [0, 1, 1, 1, 1, 1]], device=DEVICE)
    starts = torch.tensor([[0, 0, 2, 2, 2, 5], [0, 1, 1, 1, 1, 1]], dtype=torch.int32, device=DEVICE)
    assert torch.equal(kernels.documents_from_ids(ids).starts, starts)
    positions = torch.tensor([[0, 1, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4]], device=DEVICE)
    assert torch.equal(kernels.documents_from_position_ids(positions).starts, starts)
    for b, lengths in enumerate(([0, 2, 5, 6], [0, 1, 1, 6])):
        cu_seqlens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        assert torch.equal(kernels.documents_from_lengths(cu_seqlens, 6).starts, starts[b : b + 1])


