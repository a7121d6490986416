"""Turns what attention_bench measured into rows of bench/results/figures/masks_schemes.json. bench/attention_speed.sh
runs both.

    attention_rows.py CSV --output FILE --command TEXT
"""

import argparse
import csv
import pathlib

from figure_rows import write_rows

SHAPE = ("131072", "16", "2", "128")  # tokens of a rank, query and KV heads, head dimension
LISTS = {"toeplitz": "block diagonals", "csr": "random tiles"}
RATIOS = (("toeplitz", 128, 5, 0.97), ("csr", 128, 5, 0.97), ("toeplitz", 64, 10, 0.88), ("csr", 64, 5, 0.88))
RING_MS = {"forward": 23.5, "backward": 66}


def row(name, value, asked, met, line, command, **more):
    return {"row": name, "value": value, "asked": asked, "met": met, **more, "hardware": line["hardware"],
            "commit": line["commit"], "date": line["date"], "command": command}


def rows_of(lines, command):
    """Raises SystemExit where a line is missing."""
    found = {(line["kernel"], line["direction"], int(line["tile"]), round(100 * float(line["density"]))): line
             for line in lines if (line["tokens"], line["heads"], line["kv_heads"], line["head_dim"]) == SHAPE}

    def line_of(*cell):
        if cell not in found:
            raise SystemExit("attention_rows: no line of {}, {}, tile {}, {} %; run attention_bench with all of its "
                             "kernels".format(*cell))
        return found[cell]

    again = float(line_of("cudnn", "backward", 128, 100)["ratio"])
    for kernel, tile, percent, asked in RATIOS:
        line = line_of(kernel, "backward", tile, percent)
        ratio = float(line["ratio"])
        name = f"{LISTS[kernel]} of {tile} at {percent} %, 128K, GQA 16:2, backward per visible pair, ratio to cudnn"
        yield row(name, ratio, f">= {asked}", ratio >= asked, line, command,
                  peer="cudnn, dense causal attention in the same run", of_peer=float(line["cudnn_tflops"]),
                  peer_at_the_end_to_peer=again)
    for direction, asked in RING_MS.items():
        line = line_of("ring4", direction, 128, 5)
        ms = float(line["ms"])
        yield row("ring of four at 512K, GQA 16:2, block diagonals of 128 at 5 %: a rank's four steps without links, "
                  f"{direction}, ms a layer", ms, f"<= {asked}", ms <= asked, line, command, peer="none")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=pathlib.Path, help="of attention_bench")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="the file of rows, which other rows stay in")
    parser.add_argument("--command", required=True, help="that rows name")
    flags = parser.parse_args()
    with open(flags.csv, newline="") as file:
        rows = list(rows_of(csv.DictReader(file), flags.command))
    for new in rows:
        print(f"{'met    ' if new['met'] else 'NOT MET'} {new['row']}: {new['value']} (asked {new['asked']})")
    write_rows(rows, flags.output)


if __name__ == "__main__":
    main()
