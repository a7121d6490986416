"""Rows of the files in bench/results/figures/, each written by several commands."""

import json


def write_rows(new, path):
    """Puts the rows into the file, in the place of those of their names. Rows of other names stay."""
    kept = json.loads(path.read_text()) if path.exists() else []
    names = {row["row"] for row in new}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([row for row in kept if row["row"] not in names] + new, indent=1) + "\n")
