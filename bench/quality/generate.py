#!/usr/bin/env python3
"""Writes documents of tasks.py as token ids with marks, for `ringctl data pack`, which makes token shards of them:

    bench/quality/generate.py --output made --documents 64 --length 16384
    ringctl data pack --input made --output tokens --eval-share 0 --format uint16 $(cat made.options)

The same arguments give the same bytes on any machine, text aside. Needs nothing but Python's own library.
"""

import argparse
import array
import multiprocessing
import pathlib
import random
import sys

import tasks

PARTS = 17  # files, so that several processes may write at once; a prime, so that each holds every kind
TEXT_SUFFIXES = (".h", ".hpp", ".c")
CORPUS_BYTES = 64 << 20
# Kinds with few answers a document more often: a training step then has enough of each.
WEIGHTS = {"recall": 2, "recall-power": 1, "needles": 3, "needles-by-4": 3, "variables": 3, "frequent-words": 3,
           "hashes": 3, "text": 2}


def read_corpus(folder):
    """The text files under `folder`, one after the other in the order of their paths."""
    corpus = bytearray()
    for path in sorted(pathlib.Path(folder).rglob("*")):
        if path.suffix in TEXT_SUFFIXES and path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            if 0 not in content:
                corpus += content + b"\n"
        if len(corpus) > CORPUS_BYTES:
            break
    return bytes(corpus)


def write_part(part):
    """Every PARTS-th document, each from a generator of its own."""
    options = write_part.options
    ids, marks = array.array("H"), bytearray()
    for number in range(part, options["documents"], PARTS):
        kind = options["kinds"][number % len(options["kinds"])]
        document = tasks.make_document(kind, random.Random(f"{options['seed']}/{number}"), options["length"],
                                       options["symbols"], options["corpus"])
        if ids:
            ids.append(tasks.SEPARATOR)
            marks.append(tasks.GIVEN)
        ids.extend(document.tokens)
        marks.extend(document.marks)
    if not ids:
        return
    if sys.byteorder == "big":
        ids.byteswap()
    path = pathlib.Path(options["output"]) / f"part-{part:02}"
    path.write_bytes(ids.tobytes())
    path.with_name(path.name + ".marks").write_bytes(marks)


def generate(output, documents, length, symbols, seed, weights, corpus=b""):
    """`weights`: how often each kind comes in turn. Returns the options that `ringctl data pack` needs."""
    if length % 2 or length < 64 or symbols < tasks.least_symbols(length) or symbols % 2:
        raise ValueError(f"documents of {length} tokens: an even number from 64 on, with an even number of symbols that "
                         f"is at least {tasks.least_symbols(length)}")
    if "text" in weights and len(corpus) <= length:
        raise ValueError(f"{len(corpus)} bytes of text are too few for a document of {length} tokens")
    pathlib.Path(output).mkdir(parents=True)
    kinds = [kind for kind, weight in weights.items() for _ in range(weight)]
    random.Random(f"{seed}/order").shuffle(kinds)
    options = dict(output=str(output), documents=documents, length=length, symbols=symbols, seed=seed, kinds=kinds,
                   corpus=corpus)
    write_part.options = options  # what forked processes find there need not be sent to them
    with multiprocessing.get_context("fork").Pool() as pool:
        pool.map(write_part, range(PARTS), chunksize=1)
    return ["--vocabulary", str(tasks.vocabulary(symbols)), "--separator", str(tasks.SEPARATOR), "--tokenizer",
            "quality", "--tasks", ",".join(tasks.TASKS)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, help="folder for token ids and marks; OUTPUT.options gets the options")
    parser.add_argument("--documents", type=int, required=True)
    parser.add_argument("--length", type=int, default=16384, help="tokens of a document; even")
    parser.add_argument("--symbols", type=int, help="default: 2048, or what the length needs")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--kinds", help="comma-separated, of " + ", ".join(tasks.KINDS) + "; default: all that need no text")
    parser.add_argument("--text", help="folder of text, for the kind `text`")
    flags = parser.parse_args()
    corpus = read_corpus(flags.text) if flags.text else b""
    kinds = flags.kinds.split(",") if flags.kinds else [kind for kind in WEIGHTS if corpus or kind != "text"]
    if unknown := set(kinds) - set(WEIGHTS):
        parser.error(f"--kinds: no such kind: {', '.join(sorted(unknown))}")
    try:
        options = generate(flags.output, flags.documents, flags.length,
                           flags.symbols or max(2048, tasks.least_symbols(flags.length)), flags.seed,
                           {kind: 1 for kind in kinds}, corpus)
    except ValueError as error:
        parser.error(str(error))
    pathlib.Path(flags.output + ".options").write_text(" ".join(options) + "\n")


if __name__ == "__main__":
    main()
