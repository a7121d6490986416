"""Which tiles of a mask are visited, in the benches: all, or those that a seeded choice keeps."""

import random

import torch

TILE = 128
LONGEST = 8  # tiles of a block, where their sizes differ


class Choice:
    """kind: all; uniform: each tile by itself with probability `density`; learned: as models choose, the first tile, the
    neighbours of the diagonal, and columns and diagonals of tiles, until `density` is reached; variable: blocks of 1 to
    `LONGEST` tiles, each pair of them by itself with probability `density`."""

    def __init__(self, kind="all", density=1.0):
        self.kind, self.density = kind, density

    @property
    def name(self):
        return "all" if self.kind == "all" else f"{self.kind} {100 * self.density:g} %"

    def draw(self, tokens, heads, device):
        """[heads, tiles, tiles] bool, query tiles by key tiles, the diagonal always; None for all."""
        if self.kind == "all":
            return None
        tiles = (tokens + TILE - 1) // TILE
        row, column = torch.arange(tiles, device=device)[:, None], torch.arange(tiles, device=device)[None]
        near = (row - column).abs() <= 1
        if self.kind == "uniform":
            generator = torch.Generator(device).manual_seed(20251123)
            return (torch.rand(heads, tiles, tiles, device=device, generator=generator) < self.density) | (row == column)
        drawn, kept = random.Random(20251123), []
        if self.kind == "variable":
            sizes = []
            while sum(sizes) < tiles:
                sizes.append(drawn.randint(1, LONGEST))
            block = torch.arange(len(sizes), device=device).repeat_interleave(torch.tensor(sizes, device=device))[:tiles]
            generator = torch.Generator(device).manual_seed(20251123)
            pairs = torch.rand(heads, len(sizes), len(sizes), device=device, generator=generator) < self.density
            return pairs[:, block][..., block] | (row == column)
        for _ in range(heads):
            # Half of what sink and neighbours leave of a row goes to columns, half to diagonals.
            share = max(0.0, self.density - 4 / tiles) / 2
            heavy = torch.tensor([drawn.random() < share for _ in range(tiles)], device=device)
            stride = torch.tensor([drawn.random() < share for _ in range(tiles)], device=device)
            kept.append(near | (column == 0) | heavy[None] | stride[(row - column).abs()])
        return torch.stack(kept)


def choices_of(text):
    """all, uniform:PERCENT, variable:PERCENT, learned:PERCENT, or PERCENT for the first and the last of these. Raises
    SystemExit that says so."""
    if text == "all":
        return [Choice()]
    kind, _, percent = text.rpartition(":")
    try:
        density = float(percent) / 100
    except ValueError:
        density = 0.0
    if kind not in ("", "uniform", "variable", "learned") or not 0 < density <= 1:
        raise SystemExit(f"longca: choice {text!r}; it may be all, or a percentage such as 12.5, uniform:12.5, "
                         "variable:12.5 or learned:12.5")
    return [Choice(one, density) for one in ((kind,) if kind else ("uniform", "learned"))]


def pairs_of(rows, chosen):
    """Pairs that a head sees, the mean over heads. rows: [tokens, 4], the two intervals of keys of each query."""
    first, end, second, last = rows.long().unbind(-1)
    if chosen is None:
        return (end - first + last - second).sum().item()
    tokens, tiles, pairs = rows.shape[0], chosen.shape[1], 0.0
    begins = torch.arange(tiles, device=rows.device) * TILE
    kept = chosen.float().mean(0)
    for tile in range(tiles):
        here = slice(tile * TILE, min((tile + 1) * TILE, tokens))
        of_tile = sum((torch.minimum(e[here, None], begins + TILE) - torch.maximum(b[here, None], begins)).clamp(min=0)
                      for b, e in ((first, end), (second, last)))
        pairs += (of_tile.sum(0) * kept[tile]).sum().item()
    return pairs
