"""What the suite asks of each pattern at a density: the options of a job's attention that come nearest to it."""

import tasks

CAUSAL = ", causal"  # behind a pattern's name: the same, chosen without later queries


def diagonals_of(density, tokens):
    """How many block diagonals next to each other, the main one included, make up that share of the causal tiles."""
    blocks = tokens // tasks.TILE
    rest = density * blocks * (blocks + 1) / 2
    count = 0
    while count < blocks and rest >= (blocks - count) / 2:
        rest -= blocks - count
        count += 1
    return max(1, count)


def fixed_blocks_of(density, blocks):
    """Half of the share beside the diagonal, and half in landmarks."""
    local = max(0, round(density * blocks / 4) - 1)
    stride = round(1 / max(1 / blocks, density - 2 * (local + 1) / blocks))
    return {"pattern": "fixed_blocks", "local_blocks": local, "stride_blocks": max(1, stride)}


def attentions(density, tokens):
    """Every pattern's options that come nearest to `density`; what was really visited is measured."""
    blocks = tokens // tasks.TILE
    # A query block sees its own and k more where there are as many: k^2/2 fewer tiles than k + 1 a block.
    chosen = min(range(1, blocks), key=lambda k: abs((k + 1) * blocks - k * (k + 1) / 2 - density * blocks * (blocks + 1) / 2))
    block_topk = {"pattern": "block_topk", "block_size": tasks.TILE, "topk_blocks": chosen}
    return {
        "window": {"pattern": "sliding_window", "window": max(1, diagonals_of(density, tokens) - 1) * tasks.TILE},
        "vertical-slash": {"pattern": "vertical_slash", "select": "top_k", "density": density},
        "vertical-slash, spread": {"pattern": "vertical_slash", "select": "top_k", "density": density,
                                   "estimate_at": "spread"},
        "xattention": {"pattern": "xattention", "threshold": 1, "density": density},
        **{f"xattention, stride {stride}": {"pattern": "xattention", "threshold": 1, "density": density, "stride": stride}
           for stride in (32, 64)},
        "adaspa": {"pattern": "adaspa", "density": density},
        "moba": {"pattern": "moba", "block_size": max(tasks.TILE, tokens // 512), "density": density},
        "key-groups": {"pattern": "key_groups", "density": density},
        "key-groups of 16 queries": {"pattern": "key_groups", "density": density, "group_queries": 16},
        "key-groups of pairs of heads": {"pattern": "key_groups", "density": density, "group_heads": 2},
        # Budgets follow the last probes, and a job here has few steps.
        "key-groups, by probe": {"pattern": "key_groups", "density": density, "head_budgets": "by_probe", "probe_every": 4},
        "block-topk": block_topk,
        "fixed-blocks": fixed_blocks_of(density, blocks),
        f"block-topk{CAUSAL}": {**block_topk, "selection": "causal"},
    }
