#!/usr/bin/env python3
"""The picture of a table of bench/longca: bars of TFLOP/s, a chart for each length, number of ranks, choice and
direction, in it a group of bars for each mask, and a color for each kernel or scheme.

    bench/longca/picture.py TABLE.csv...     beside each table, TABLE.svg
"""

import argparse
import csv
import html
import pathlib

COLORS = ("#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#d62728", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
BAR, LINE, HEIGHT = 28, 14, 190


def _speed(row):
    """In TFLOP/s; None of a cell that has none."""
    for column, unit in (("tflops", 1), ("gflops", 1e-3)):
        if row.get(column) not in (None, ""):
            return float(row[column]) * unit
    return None


def _chart_of(row):
    ranks = f", {row['ranks']} ranks" if "ranks" in row else ""
    return f"{row['tokens']} tokens{ranks}, {row['choice']} tiles, {row['direction']}"


def picture(rows, path):
    """rows: as csv.DictReader returns them, or with numbers."""
    bar_of = lambda row: row.get("kernel") or row["scheme"]
    bars, charts, masks = (list(dict.fromkeys(map(of, rows))) for of in (bar_of, _chart_of, lambda row: row["mask"]))
    step, top = max(96, BAR * len(bars) + 12), LINE * len(bars) + 16
    width = max(420, 60 + step * len(masks))
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top + HEIGHT * len(charts)}" '
             'font-family="sans-serif" font-size="10">', '<rect width="100%" height="100%" fill="white"/>']
    color_of = {bar: COLORS[i % len(COLORS)] for i, bar in enumerate(bars)}
    for i, bar in enumerate(bars):
        parts.append(f'<rect x="60" y="{LINE * i + 8}" width="10" height="10" fill="{color_of[bar]}"/>'
                     f'<text x="75" y="{LINE * i + 17}">{html.escape(bar)}</text>')
    for c, chart in enumerate(charts):
        here = [row for row in rows if _chart_of(row) == chart]
        most = max((speed for row in here if (speed := _speed(row)) is not None), default=0) or 1
        base = top + HEIGHT * (c + 1) - 45
        parts.append(f'<text x="8" y="{base - HEIGHT + 62}">{html.escape(chart)}: TFLOP/s</text>')
        for m, mask in enumerate(masks):
            parts.append(f'<text x="{60 + step * m}" y="{base + 12 + 11 * (m % 2)}">{html.escape(mask)}</text>')
        for row in here:
            speed = _speed(row)
            if speed is None:
                continue
            height = speed / most * (HEIGHT - 85)
            x = 60 + step * masks.index(row["mask"]) + BAR * bars.index(bar_of(row))
            parts.append(f'<rect x="{x}" y="{base - height:.1f}" width="{BAR - 2}" height="{height:.1f}" '
                         f'fill="{color_of[bar_of(row)]}"/>'
                         f'<text x="{x}" y="{base - height - 2:.1f}">{speed:.0f}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", metavar="TABLE.csv", nargs="+", type=pathlib.Path)
    for table in parser.parse_args().tables:
        with open(table, newline="") as file:
            picture(list(csv.DictReader(file)), table.with_suffix(".svg"))
