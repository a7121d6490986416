"""Lengths of the documents that a sequence is packed of, drawn with a fixed seed."""

import bisect
import itertools
import json
import math
import pathlib
import re
from typing import NamedTuple

SEED = 20251116  # kSeed in ../problem.h
PUBLISHED = pathlib.Path(__file__).resolve().parents[1] / "lengths"  # a file each


class SplitMix:
    """As document_lengths.cc draws."""

    def __init__(self, seed):
        self.state = seed

    def unit(self):
        """[0, 1)"""
        mask = 2**64 - 1
        self.state = x = (self.state + 0x9e3779b97f4a7c15) & mask
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9 & mask
        x = (x ^ (x >> 27)) * 0x94d049bb133111eb & mask
        return ((x ^ (x >> 31)) >> 11) * 2.0**-53


class Lengths(NamedTuple):
    bins: list  # (low, high, share): lengths of [low, high), even over their logarithms
    tokens: int | None  # lengths are of sequences of so many, and are scaled with them; None: they stay as they are
    name: str

    def firsts(self, tokens):
        """Where the documents of a sequence of so many tokens begin. The last one is cut off at its end.
        DocumentLengths::Firsts draws the same."""
        random, first = SplitMix(SEED), 0
        scale = 1.0 if self.tokens is None else tokens / self.tokens
        until = list(itertools.accumulate(share for _, _, share in self.bins))
        while first < tokens:
            yield first
            low, high, _ = self.bins[bisect.bisect_right(until, random.unit() * until[-1])]
            first += max(1, int(low * (high / low) ** random.unit() * scale))


# Those of bench/length_distributions.h: mostly of 1K to 64K, one in eighteen of 64K to 256K.
PROLONG_LIKE = Lengths([(65536, 262144, 0.055), (1024, 65536, 0.945)], 131072, "ProLong-like")


def of_histogram(path):
    """Of a file in the form of LongCA-bench's histograms: JSON, the share of documents in each bin by "[low,high)".
    Raises SystemExit that says what is wrong with it."""
    def bin_of(text, share):
        bounds = re.fullmatch(r"\[(\d+),(\d+)\)", text)
        low, high = map(int, bounds.groups()) if bounds else (0, 0)
        if not low < high or type(share) not in (int, float) or not 0 <= share < math.inf:
            raise SystemExit(f'longca: {path}: {text!r}: {share!r} is no share of a bin such as "[32,64)": 0.06')
        return max(1, low), high, share  # a document has a token

    try:
        shares = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"longca: {path} is no file of JSON: {error}") from error
    bins = [bin_of(*item) for item in shares.items()] if isinstance(shares, dict) else []
    if not sum(share for _, _, share in bins) > 0:
        raise SystemExit(f'longca: {path} has no bins, such as "[32,64)": 0.06')
    published = PUBLISHED / f"{path.stem}.json"
    is_another = published.exists() and json.loads(published.read_text()) != shares
    return Lengths(bins, None, str(path) if is_another else path.stem)
