"""What the choices choose, against their definitions; that attention then sees it is attention_test.py's."""

import pytest
import torch
from oracle import DEVICE, attend, causal, check, document_ids, inputs, pairs_of_tiles, same_document
from torch.nn.attention.flex_attention import create_block_mask

from ringleader import kernels
from ringleader.kernels import sparse_attention


def bits_of(words, count):
    """[..., words] -> [..., count] bool"""
    width = words.element_size() * 8
    return (words.unsqueeze(-1) >> torch.arange(width, device=words.device) & 1).flatten(-2)[..., :count].bool()


def tiles_of(lists, tiles):
    """TileLists -> [batch, heads, tiles, tiles] bool, from either direction, which agree."""
    batch, heads = lists.row_offsets.shape[:2]
    by_row = torch.zeros(batch, heads, tiles, tiles, dtype=torch.bool)
    by_column = by_row.clone()
    rows, columns, column_offsets, row_list = (x.cpu() for x in lists[:4])
    for b, h, t in torch.cartesian_prod(*map(torch.arange, (batch, heads, tiles))).tolist():
        by_row[b, h, t, columns[rows[b, h, t] : rows[b, h, t + 1]].long()] = True
        by_column[b, h, row_list[column_offsets[b, h, t] : column_offsets[b, h, t + 1]].long(), t] = True
    assert torch.equal(by_row, by_column)
    return by_row.to(DEVICE)


def chosen_blocks(tokens):
    """What a function may return as blocks."""
    of_window = create_block_mask(lambda b, h, q, kv: (q - kv).abs() < 50, None, None, tokens, tokens, device=DEVICE)
    counts = torch.tensor([1, 1, 2], device=DEVICE)
    return {
        "None": None,
        "a BlockMask of a mask of its own": of_window,
        "lists of a mask of their own": kernels.tiles_from_block_mask(of_window, heads=4, batch=2),
        "(counts, indices)": (counts, torch.tensor([[0, 0], [1, 0], [2, 1]], device=DEVICE)),
        "a SlidingWindow": kernels.SlidingWindow(60),
        "diagonals": kernels.block_diagonals(torch.tensor([True, False, True], device=DEVICE).expand(2, 4, 3)),
    }


@pytest.mark.parametrize("name", ["None", "a BlockMask of a mask of its own", "lists of a mask of their own", "(counts, indices)",
                                  "a SlidingWindow", "diagonals"])
def test_functions_return_what_could_be_passed(name):
    q, k, v = inputs(2, 4, 2, 300, 64)
    blocks = chosen_blocks(300)[name]
    assert torch.equal(sparse_attention(q, k, v, lambda *_, **__: blocks), sparse_attention(q, k, v, blocks))


def test_what_functions_return_is_refused():
    q, k, v = inputs(1, 4, 2, 300, 64)
    for blocks, message in ((kernels.Moba(), "blocks, a function, returned a Moba"), (7, "blocks, a function, returned a int"),
                            ((1, 2), "blocks is a tuple")):
        with pytest.raises(TypeError, match=message):
            sparse_attention(q, k, v, lambda *_, blocks=blocks, **__: blocks)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("choice", [kernels.VerticalSlash(), kernels.Moba(), kernels.KeyGroups(), kernels.XAttention()],
                         ids=lambda choice: type(choice).__name__)
def test_choices_on_the_meta_device(choice, documents):
    """What attention and gradients look like, without computing them."""

    def layouts(device):
        q, k, v = (x.detach().to(device).requires_grad_() for x in inputs(2, 4, 2, 300, 64))
        out = sparse_attention(q, k, v, choice, documents=document_ids(2, 300).to(device) if documents else None)
        results = out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert all(x.device.type == device for x in results)
        return [(x.dtype, x.shape, x.stride()) for x in results]

    assert layouts("meta") == layouts(DEVICE)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("choice", [None, kernels.SlidingWindow(60), kernels.VerticalSlash(), kernels.VerticalSlash(density=0.2), kernels.Moba(),
                                    kernels.Moba(block_size=128, topk_blocks=2), kernels.KeyGroups(), kernels.XAttention()],
                         ids=lambda choice: type(choice).__name__)
def test_no_sequence(choice, documents):
    """What is left of a batch of which a rank has none: nothing is computed, and gradients are as empty."""
    q, k, v = (x.detach()[:0].requires_grad_() for x in inputs(1, 4, 2, 300, 64))
    ids = document_ids(1, 300)[:0] if documents else None
    out, lse = sparse_attention(q, k, v, choice, documents=ids, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 4, 300, 64), (0, 4, 300))
    assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]
    if callable(choice):
        chosen = choice(q, k, documents=ids)
        assert sparse_attention(q, k, v, chosen, documents=ids).shape == q.shape
        of_one = choice(*(x.detach() for x in inputs(1, 4, 2, 300, 64)[:2]))
        assert type(chosen) is type(of_one)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("density", [0.0, 0.5, 0.9])  # 0.9 of ten blocks are nine
def test_moba_is_what_its_paper_says(documents, density):
    tokens, block, topk = 650, 64, 3
    q, k, v = inputs(2, 4, 2, tokens, 64)
    ids = torch.zeros(2, tokens, dtype=torch.int64, device=DEVICE)
    if documents:
        ids[:, 150:] = 1
        ids[1, 300:] = 2
    choice = kernels.Moba(block_size=block, topk_blocks=topk, density=density, tile=64)(
        q, k, documents=ids if documents else None)
    blocks = -(-tokens // block)
    chosen = bits_of(choice.queries, tokens).transpose(2, 3)  # [batch, heads, tokens, blocks]
    # The definition: scores of mean keys, of the document of a block's last one, in float64.
    block_of_key = torch.arange(tokens, device=DEVICE) // block
    last = ids[:, [min((b + 1) * block, tokens) - 1 for b in range(blocks)]]
    counted = ((block_of_key == torch.arange(blocks, device=DEVICE).unsqueeze(1))
               & (ids.unsqueeze(1) == last.unsqueeze(-1))).double()  # [batch, blocks, tokens]
    means = ((counted / counted.sum(-1, keepdim=True)).unsqueeze(1) @ k.detach().double()).repeat_interleave(2, 1)
    scores = q.detach().double() @ means.mT
    own = torch.arange(tokens, device=DEVICE) // block
    starts = kernels.documents_from_ids(ids).starts // block
    block_of = torch.arange(blocks, device=DEVICE)
    before = (block_of < own.unsqueeze(1)) & (block_of >= starts.unsqueeze(-1)).unsqueeze(1)
    ranks = scores.masked_fill(~before, -torch.inf).argsort(-1, descending=True).argsort(-1)
    seen = (own - starts + 1).unsqueeze(1).unsqueeze(-1)
    kept = (density * seen.double()).floor().clamp(min=1) if density > 0 else torch.full_like(seen, topk)
    wanted = before & (ranks < kept - 1) | (block_of == own.unsqueeze(1))
    # Scores in float32, on GPUs of bf16: a few queries may choose another of two nearly equal blocks.
    assert (chosen != wanted).float().mean() < 1e-3
    pairs = chosen.repeat_interleave(block, -1)[..., :tokens] & causal(tokens)
    # GPUs gather queries; where nobody says how many blocks these keep, they visit tiles whole.
    for blocks in (choice, choice._replace(topk_blocks=0, density=0.0)):
        check(lambda q, k, v: kernels.sparse_attention(
            q, k, v, blocks, documents=ids if documents else None, return_lse=True), q, k, v, pairs & same_document(ids))


@pytest.mark.parametrize("topk", [8, 2**31, 2**32, 2**63 - 1])
def test_moba_of_all_blocks_is_causal(topk):
    q, k, v = inputs(1, 2, 1, 500, 64)
    check(lambda q, k, v: kernels.sparse_attention(
        q, k, v, kernels.Moba(block_size=64, topk_blocks=topk, tile=64), return_lse=True), q, k, v, causal(500))


@pytest.mark.parametrize("tokens, count", [(1, 1), (64, 64), (1000, 16), (131072, 256)])
def test_where_queries_lie_that_choose(tokens, count):
    """SpreadPosition of ringleader/kernels/index.h."""
    expected = []
    for number in range(count):
        begin, end = number * tokens // count, (number + 1) * tokens // count
        expected.append(begin + (((number + 1) * 0x9E3779B97F4A7C15 % 2**64 >> 40) * (end - begin) >> 24))
    q = torch.empty(1, 1, tokens, 1, device=DEVICE)
    assert kernels.operators.ops.spread_positions(q, count).tolist() == expected


@pytest.mark.parametrize("estimate_at, documents", [("end", False), ("spread", False), ("spread", True)])
def test_vertical_slash_keeps_what_its_queries_attend_to(estimate_at, documents):
    tokens, tile, tiles = 512, 64, 8
    q, k, v = inputs(2, 4, 2, tokens, 64)
    with torch.no_grad():  # all queries look for what keys 100 and 333 of the second sequence, and the first's 77, have
        direction = torch.ones(64).to(k)
        q += 0.5 * direction
        for b, position in ((1, 100), (1, 333), (0, 77)):
            k[b, :, position] = 4 * direction
    ids = torch.zeros(2, tokens, dtype=torch.int64, device=DEVICE)
    if documents:
        ids[1, 200:] = 1
    arguments = {"documents": ids} if documents else {}
    choice = kernels.VerticalSlash(estimate_queries=64, estimate_at=estimate_at, max_columns=8, sink_tokens=2,
                                   max_diagonals=2, local_blocks=1, tile=tile)(q, k, **arguments)
    kept = bits_of(choice.bits, tiles)
    assert kept[..., :2].all() and (kept.sum(-1) <= 3).all()
    delta = torch.arange(tiles, device=DEVICE)
    assert torch.equal(choice.visited, (kept * (tiles - delta)).sum((1, 2)))
    columns = choice.columns
    for b, h in torch.cartesian_prod(torch.arange(2), torch.arange(4)).tolist():
        count = columns.counts[b, h].item()
        positions = columns.positions[b, h, :count].tolist()
        assert positions == sorted(set(positions)) and positions[:2] == [0, 1] and count <= 8
        if b == 0:
            assert 77 in positions
        else:
            assert 333 in positions or kept[b, h, 2:].any()
            if not documents:
                assert 100 in positions
    pairs = pairs_of_tiles(kept[..., (delta.unsqueeze(1) - delta).clamp(min=0)], tokens, tile)
    for b, h in torch.cartesian_prod(torch.arange(2), torch.arange(4)).tolist():
        pairs[b, h, :, columns.positions[b, h, : columns.counts[b, h]]] = True
    check(lambda q, k, v: kernels.sparse_attention(q, k, v, choice, return_lse=True, **arguments), q, k, v,
          pairs & causal(tokens) & same_document(ids))


def test_vertical_slash_of_several_sequences_is_that_of_each():
    """Where what belongs to one begins in a tensor of all is aligned to no more than a number."""
    q, k, v = inputs(3, 3, 1, 4032, 64)
    choice = kernels.VerticalSlash(estimate_queries=64, max_columns=7, sink_tokens=2, tile=64)
    chosen = choice(q, k)
    out = kernels.sparse_attention(q, k, v, choice)
    for b in range(3):
        alone = choice(q[b : b + 1], k[b : b + 1])
        assert torch.equal(chosen.bits[b], alone.bits[0]) and chosen.visited[b] == alone.visited[0]
        assert torch.equal(chosen.columns.counts[b], alone.columns.counts[0])
        for head, count in enumerate(alone.columns.counts[0].tolist()):
            assert torch.equal(chosen.columns.positions[b, head, :count], alone.columns.positions[0, head, :count])
        assert torch.equal(out[b], kernels.sparse_attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], alone)[0])


@pytest.mark.parametrize("density", [0.1, 0.5])
def test_vertical_slash_visits_the_share_that_it_may(density):
    tokens, tile = 4096, 64
    q, k, _ = inputs(1, 4, 2, tokens, 64)
    choice = kernels.VerticalSlash(column_mass=1.0, diagonal_mass=1.0, sink_tokens=4, local_blocks=0, density=density,
                                   tile=tile)(q, k)
    tiles = tokens // tile
    share = choice.visited.item() / (4 * tiles * (tiles + 1) / 2)
    # The diagonal that crosses four fifths of the share is the last.
    assert 0.8 * density <= share <= 0.8 * density + tiles / (tiles * (tiles + 1) / 2)
    assert (choice.columns.counts == round(0.1 * density * tokens)).all()


def pairs_of_groups(choice, tokens):
    """ChosenGroups -> [batch, heads, tokens, tokens]: what its tiles keep, and their own, without the causal mask."""
    tiles = -(-tokens // 64)
    kept = torch.zeros(*choice.bits.shape[:2], tokens, tokens, dtype=torch.bool, device=DEVICE)
    for tile in range(tiles):
        begin, end = tile * 64, min((tile + 1) * 64, tokens)
        words = choice.bits[..., choice.rows[tile] : choice.rows[tile + 1]]
        groups = bits_of(words, 8 * tile) if tile else words.new_zeros(*words.shape[:2], 0, dtype=torch.bool)
        kept[..., begin:end, : 8 * 8 * tile] = groups.repeat_interleave(8, -1).unsqueeze(2)
        kept[..., begin:end, begin:end] = True
    return kept


@pytest.mark.parametrize("tokens", [40, 64, 500, 640])
@pytest.mark.parametrize("documents", [False, True])
def test_key_groups_are_what_attention_sees(tokens, documents):
    q, k, v = inputs(2, 4, 2, tokens, 64)
    ids = torch.zeros(2, tokens, dtype=torch.int64, device=DEVICE)
    if documents:
        ids[:, 37:] = 1
        ids[1, 300:] = 2
    arguments = {"documents": ids} if documents else {}
    choice = kernels.KeyGroups(density=0.4)(q, k, **arguments)
    check(lambda q, k, v: kernels.sparse_attention(q, k, v, choice, return_lse=True, **arguments), q, k, v,
          pairs_of_groups(choice, tokens) & causal(tokens) & same_document(ids))


def test_key_groups_of_everything_are_causal():
    q, k, v = inputs(2, 4, 2, 500, 128)
    check(attend(kernels.KeyGroups(density=1.0)), q, k, v, causal(500))


@pytest.mark.parametrize("density", [0.05, 0.2])
def test_key_groups_visit_their_share(density):
    tokens = 8192
    q, k, _ = inputs(1, 2, 1, tokens, 64)
    choice = kernels.KeyGroups(density=density)(q, k)
    groups = sum(bits_of(choice.bits[..., choice.rows[t] : choice.rows[t + 1]], 8 * t).sum() for t in range(1, tokens // 64))
    share = (2 * tokens // 64 * 8 + groups.item()) / (2 * 8 * (tokens // 64) * (tokens // 64 + 1) / 2)
    assert share == pytest.approx(density, rel=0.05)


def test_key_groups_have_what_one_query_looks_for():
    q, k, _ = inputs(1, 4, 2, 2048, 64)
    with torch.no_grad():
        q.copy_(4 * k.repeat_interleave(2, 1))  # all others look for themselves
        for query, key in ((300, 17), (1000, 555), (1001, 3), (2040, 1234)):
            q[:, :, query] = 4 * k[:, :, key].repeat_interleave(2, 1)
    choice = kernels.KeyGroups(density=0.2)(q, k)
    kept = pairs_of_groups(choice, 2048)
    for query, key in ((300, 17), (1000, 555), (1001, 3), (2040, 1234)):
        assert kept[:, :, query, key].all()
    alone = kernels.KeyGroups(density=0.2)(q[:, 2:], k[:, 1:])
    assert torch.equal(choice.bits[:, 2:], alone.bits), "a KV head's queries choose for themselves"


@pytest.mark.parametrize("stride", [8, 32])
def test_xattention_keeps_the_tiles_of_most_mass(stride):
    tokens, tile, tiles = 512, 64, 8
    q, k, v = inputs(1, 4, 2, tokens, 64)
    lists = kernels.XAttention(stride=stride, threshold=1.0, density=0.5, tile=tile)(q, k)
    kept = tiles_of(lists, tiles)
    # The definition, in float64: antidiagonal means of logits, softmax over groups up to a row's own, sums by tile.
    logits = q.detach().double() @ k.detach().double().repeat_interleave(2, 1).mT * 64**-0.5
    groups = tokens // stride
    cells = logits.unflatten(3, (groups, stride)).unflatten(2, (groups, stride))  # [.., g, i, h, j]
    i = torch.arange(stride, device=DEVICE)
    scores = cells[:, :, :, i, :, stride - 1 - i].mean(0)  # advanced indices come first
    group = torch.arange(groups, device=DEVICE)
    masses = scores.masked_fill(group > group.unsqueeze(1), -torch.inf).softmax(-1)
    of_tiles = masses.unflatten(-1, (tiles, -1)).sum(-1).unflatten(-2, (tiles, -1)).sum(-2)
    for row in range(tiles):
        most = max(2 if row > 0 else 1, (row + 1) // 2)
        assert (kept[:, :, row].sum(-1) == most).all()
        assert kept[:, :, row, row].all() and kept[:, :, row, 0].all()
        others = of_tiles[:, :, row, 1:row]
        best = others.sort(-1, descending=True).values[..., : max(most - 2, 0)].sum(-1)
        of_kept = (others * kept[:, :, row, 1:row]).sum(-1)
        assert torch.allclose(of_kept, best, rtol=2e-2)
    check(lambda q, k, v: kernels.sparse_attention(q, k, v, lists, return_lse=True), q, k, v,
          pairs_of_tiles(kept, tokens, tile) & causal(tokens))
