"""Loads torch.ops.ringleader (kernels/ops/attention_ops.cc has the schemas) and says what shapes its results have."""

import pathlib

import torch

_FOLDER = pathlib.Path(__file__).parent


def _load():
    built_for = (_FOLDER / "built_for.txt").read_text().strip()
    again = "build it again with deploy/python_kernels.sh"
    if torch.__version__.split("+")[0] != built_for.split("+")[0]:
        raise ImportError(f"ringleader.kernels was built for PyTorch {built_for}, and this is {torch.__version__}: {again}")
    libraries = ["ringleader_cpu.so"]
    # On a machine without GPU kernels the operators say that they have none for its device.
    if torch.version.cuda is not None and (_FOLDER / "ringleader_cuda.so").exists():
        libraries.append("ringleader_cuda.so")
    for library in libraries:
        try:
            torch.ops.load_library(_FOLDER / library)
        except OSError as error:
            raise ImportError(f"ringleader.kernels, built for PyTorch {built_for}, does not load into {torch.__version__} "
                              f"({error}): {again}") from error


_load()
ops = torch.ops.ringleader


def autocast(*tensors):
    """What attention computes in where torch.autocast is on: its type, as in F.scaled_dot_product_attention. It is never on
    for the meta device, of which PyTorch refuses to be asked."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)


def _check_devices(q, **others):
    """PyTorch calls what stands here for an operator of which one tensor is on the meta device, whatever the others are."""
    for name, x in others.items():
        for part in x if isinstance(x, (list, tuple)) else [x]:
            if part is not None and part.device != q.device:
                raise ValueError(f"{name} is on {part.device} and q on {q.device}; they must be alike")


def _tiles(tokens, tile):
    return (tokens + tile - 1) // tile


@torch.library.register_fake("ringleader::attention")
def _(q, k, v, pattern, lists, documents=None, intervals=None, *_, **__):
    _check_devices(q, k=k, v=v, blocks=lists, documents=documents, mask=intervals)
    batch, heads, tokens, head_dim = q.shape
    out = q.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)
    return out, q.new_empty(batch, heads, tokens, dtype=torch.float32)


@torch.library.register_fake("ringleader::attention_backward")
def _(d_out, d_lse, q, k, v, out, lse, pattern, lists, documents, intervals, tile, size, topk_blocks,
      density, scale, deterministic):
    _check_devices(q, k=k, v=v, d_out=d_out, d_lse=d_lse, blocks=lists, documents=documents, mask=intervals)

    def like(x):
        batch, heads, tokens, head_dim = x.shape
        return x.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)

    return like(q), like(k), like(k)


@torch.library.register_fake("ringleader::tile_lists")
def _(chosen, tokens, tile, block_size, capacity):
    batch, heads = chosen.shape[:2]
    offsets = [chosen.new_empty(batch, heads, _tiles(tokens, tile) + 1) for _ in range(2)]
    return offsets[0], chosen.new_empty(capacity), offsets[1], chosen.new_empty(capacity)


@torch.library.register_fake("ringleader::spread_positions")
def _(q, count):
    return q.new_empty(count, dtype=torch.int64)


@torch.library.register_fake("ringleader::choose_vertical_slash")
def _(q, k, positions, starts, tile, scale, column_mass, diagonal_mass, max_columns, max_diagonals, density,
      sink_tokens, local_blocks):
    _check_devices(q, k=k, documents=starts)
    batch, heads, tokens, _ = q.shape
    return (
        q.new_empty(batch, heads, _tiles(_tiles(tokens, tile), 64), dtype=torch.int64),
        q.new_empty(batch, heads, max_columns, dtype=torch.int64),
        q.new_empty(batch, heads, dtype=torch.int32),
        q.new_empty(batch, dtype=torch.int64),
    )


@torch.library.register_fake("ringleader::choose_moba")
def _(q, k, documents, tile, block_size, topk_blocks, density):
    _check_devices(q, k=k, documents=documents)
    batch, heads, tokens, _ = q.shape
    blocks = _tiles(tokens, block_size)
    return (
        q.new_empty(batch, heads, _tiles(tokens, tile), _tiles(blocks, 32), dtype=torch.int32),
        q.new_empty(batch, heads, blocks, _tiles(tokens, 32), dtype=torch.int32),
    )


@torch.library.register_fake("ringleader::choose_key_groups")
def _(q, k, documents, scale, density):
    _check_devices(q, k=k, documents=documents)
    batch, heads, tokens, _ = q.shape
    tiles = _tiles(tokens, 64)
    fours, rest = (tiles - 1) // 4, (tiles - 1) % 4  # a tile has words for the earlier tiles, four in one
    return (
        q.new_empty(batch, heads, _tiles(tiles, 64), dtype=torch.int64),
        q.new_empty(batch, heads, torch.sym_max((fours + 1) * (2 * fours + rest), 1), dtype=torch.int32),
        q.new_empty(tiles + 1, dtype=torch.int64),
    )


@torch.library.register_fake("ringleader::choose_xattention")
def _(q, k, documents, tile, stride, scale, threshold, density):
    _check_devices(q, k=k, documents=documents)
    batch, heads, tokens, _ = q.shape
    tiles = _tiles(tokens, tile)
    return q.new_empty(batch, heads, tiles, _tiles(tiles, 32), dtype=torch.int32)
