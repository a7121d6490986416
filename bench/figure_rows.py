"""Rows of the files in bench/results/figures/, each written by several commands."""

import json


def write_rows(new, path, all_of=None):
    """Puts the rows into the file, in the place of those of their names. Rows of other names stay, but for those of the
    command `all_of`, which has made all of its rows anew."""
    kept = json.loads(path.read_text()) if path.exists() else []
    names = {row["row"] for row in new}
    kept = [row for row in kept if row["row"] not in names and (all_of is None or row["command"] != all_of)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept + new, indent=1) + "\n")
