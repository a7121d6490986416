#!/usr/bin/env python3
"""Checks that the code keeps to its maps: who includes whom, without circles, in folders that stay small.

The map is the table "Folders and who may use whom" of docs/design.md. Product sources are checked (tests, testing/ and
bench/ may include anything):

* A file belongs to the row with the longest folder that holds it. Files of one row include each other freely, and what
  the row's last column names: folders (with all below them), single headers, the libraries of LIBRARIES.
* Of kernels/ the rest of the tree includes only the headers of the second table.
* No source sees both LibTorch and protobuf, through however many headers.
* Paths that README.md, kernels/README.md, docs/design.md and docs/glossary.md name exist, and so do the tests that
  docs/robustness.md names.
* Nothing is called of what FORBIDDEN lists.
* Folders do not include each other in a circle, no two headers share a base name, and no folder holds more than FILES
  files, tests counted.

What the lists of exceptions below name has to be true: an exception that is no longer needed is an error, too.

    tests/includes.py [ROOT]     checks the tree of ROOT (default: this checkout); exits with 1 when anything is wrong
"""

import collections
import fnmatch
import pathlib
import re
import subprocess
import sys

PAGES = ("README.md", "kernels/README.md", "docs/design.md", "docs/glossary.md")  # maps whose paths have to exist
FILES = 20  # sources that a reader can hold in the head

# Folders with more than FILES sources, and why.
LARGE_FOLDERS = {}

# Headers of one base name that are the same thing for two devices.
SAME_FOR_TWO_DEVICES = {"attention.h", "columns.h"}

# Includes against the direction of the others, (from, to), each of which closes a circle of folders.
BACKWARD_INCLUDES = {
    ("cli", "cli/commands"): "app.cc lists the commands and lies beside what they share",
    ("worker/model/memory", "worker/model/decoder"): "saved_layers.h holds what LayerPasses save",
    ("worker/trainer", "worker/trainer/link"): "the process's main function lies beside what its rooms share",
    ("worker/trainer", "worker/trainer/steps"): "the process's main function lies beside what its rooms share",
    ("worker/trainer/steps", "worker/trainer/engine"): "run.cc picks the engine",
}

# Sources outside of kernels/ that include a private header of it, and why.
PRIVATE_INCLUDES = {}

# Libraries that the map names, by the beginnings of their headers' paths.
LIBRARIES = {
    "LibTorch": ("torch/", "ATen/", "c10/"),
    "CUDA": ("cuda", "nccl", "cooperative_groups", "nvtx", "nvml", "cublas"),
    "gRPC": ("grpcpp/", "grpc/"),
    "protobuf": ("google/protobuf/",),  # comes with proto/
}
GENERATED = ("ringleader/v1/", "google/rpc/", "opentelemetry/")  # by protoc, from proto/

# What product sources do not do, as (pattern, why not and what instead, {file that may: why}).
FORBIDDEN = (
    (
        re.compile(r"\b(?:Await|Wait|WaitForNotification|LockWhen|ReaderLockWhen)With(?:Timeout|Deadline)\b"),
        "sleeps until a time of the wall clock, which may be set; base/wait/timed_wait.h does not",
        {},
    ),
    (
        re.compile(r"for \([^;{]*?:\s*[\w:]*directory_iterator\([^;{]*?,\s*\w+\)\)"),
        "throws at an error of a later entry, for all its error code; count with increment(error)",
        {
            "jobspec/files.cc": "lists a model's folder once, where ringctl checks a job",
            "model_shape/companion_files.cc": "lists a model's templates once, before training",
        },
    ),
)
INCLUDE = re.compile(r'\s*#\s*include\s+(["<])([^">]+)[">]')


def is_product(path):
    parts = path.split("/")
    return (
        parts[0] not in ("tests", "bench")
        and not {"testing", "bench"} & set(parts[:-1])
        and not re.search(r"_(test|bench)\.\w+$", path)
    )


class Tree:
    """The sources of a checkout and what each of them includes."""

    def __init__(self, root):
        self.root = root
        listed = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "*.h", "*.cc", "*.cu", "*.cuh"],
            check=True, capture_output=True, text=True,
        ).stdout.split()
        self.files = sorted(f for f in set(listed) if (root / f).exists())
        known = set(self.files)
        # file -> [(line, what the include names, file of this tree or None)]
        self.includes = {}
        for file in self.files:
            found = self.includes[file] = []
            for number, line in enumerate((root / file).read_text().splitlines(), 1):
                match = INCLUDE.match(line)
                if match:
                    name = match[2]
                    inside = [f for f in (name, f"kernels/include/{name}") if f in known]
                    found.append((number, name, inside[0] if inside else None))

    def sees(self, file):
        """Names of all headers that reach `file`, directly or through others."""
        names, waiting, visited = set(), [file], {file}
        while waiting:
            for _, name, target in self.includes[waiting.pop()]:
                names.add(name)
                if target and target not in visited:
                    visited.add(target)
                    waiting.append(target)
        return names


def read_tables(design):
    """-> (folder -> what it may use), [patterns of the headers of kernels/ that others may include]."""
    tables, heading = {}, ""
    for line in design.read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ").replace("`", "")
        cells = [c.strip() for c in line.strip().strip("|").split("|")]
        if line.startswith("|") and cells[0].startswith("`"):
            names = [re.findall(r"`([^`]+)`", c) for c in (cells[0], cells[-1])]
            libraries = [library for library in LIBRARIES if library in cells[-1]]
            for folder in names[0]:
                uses = [n.rstrip("/") for n in names[1]] + libraries
                tables.setdefault(heading, {})[folder.rstrip("/")] = uses
    public = tables["What the rest of the tree may include of kernels/"]
    return tables["Folders and who may use whom"], [p for patterns in public.values() for p in patterns]


def is_below(path, name):
    """Whether `name` is the file `path`, a folder around it or a pattern of its name."""
    return path == name or path.startswith(name + "/") or (
        fnmatch.fnmatch(path, name) and path.count("/") == name.count("/"))


def row_of(path, rows):
    return max((r for r in rows if is_below(path, r)), key=len, default=None)


def is_allowed(name, target, own, allowed):
    """Whether a file of row `own`, which may use `allowed`, may include `name`, which is `target` in this tree."""
    if target is None and not name.startswith(GENERATED):
        libraries = [library for library, starts in LIBRARIES.items() if name.startswith(starts)]
        return not libraries or libraries[0] in allowed or (libraries == ["protobuf"] and "proto" in [own, *allowed])
    path = target or "proto/" + name
    return any(is_below(path, a) for a in [own, *allowed])


def check_map(tree, rows, public):
    unused = set(PRIVATE_INCLUDES)
    for file in filter(is_product, tree.files):
        own = row_of(file, rows)
        if own is None:
            yield f"{file}: no row of docs/design.md holds its folder; give it one"
            continue
        for line, name, target in tree.includes[file]:
            place = f"{file}:{line}: includes {name}"
            if not is_allowed(name, target, own, rows[own]):
                allowed = ", ".join(rows[own]) or "nothing"
                yield f"{place}; docs/design.md lets {own}/ use: {allowed}"
            if target and not is_product(target):
                yield f"{place}, which is for tests only"
            inside = [f.startswith("kernels/") for f in (file, target or "")]
            if inside == [False, True] and not any(is_below(target, pattern) for pattern in public):
                unused.discard(file)
                if file not in PRIVATE_INCLUDES:
                    yield f"{place}, which is private to kernels/; docs/design.md lists the headers that are not"
    for file in unused:
        yield f"tests/includes.py: {file} includes nothing private of kernels/; strike it from the exceptions"


def check_worlds(tree):
    for file in filter(is_product, tree.files):
        if file.endswith((".cc", ".cu")):
            names = tree.sees(file)
            torch = [n for n in names if n.startswith(LIBRARIES["LibTorch"])]
            protobuf = [n for n in names if n.startswith(LIBRARIES["gRPC"] + LIBRARIES["protobuf"] + GENERATED)]
            if torch and protobuf:
                yield f"{file}: sees LibTorch ({min(torch)}) and protobuf ({min(protobuf)}); exchange plain structs"


def check_forbidden(tree):
    for pattern, why, exceptions in FORBIDDEN:
        unused = set(exceptions)
        for file in filter(is_product, tree.files):
            text = (tree.root / file).read_text()
            for match in pattern.finditer(text):
                unused.discard(file)
                if file not in exceptions:
                    line = text.count("\n", 0, match.start()) + 1
                    yield f"{file}:{line}: {' '.join(match[0].split())}: {why}"
        for file in sorted(unused):
            yield f"tests/includes.py: {file} does nothing that is forbidden; strike it from the exceptions"


def folder_of(path):
    return path.rsplit("/", 1)[0] if "/" in path else "."


def find_circle(edges):
    """A circle of folders, [a, b, ..., a], or None."""
    state, path = {}, []

    def visit(folder):
        state[folder] = "open"
        path.append(folder)
        for following in sorted(edges[folder]):
            if state.get(following) == "open":
                return path[path.index(following):] + [following]
            if following not in state:
                circle = visit(following)
                if circle:
                    return circle
        path.pop()
        state[folder] = "done"
        return None

    for folder in sorted(edges):
        if folder not in state:
            circle = visit(folder)
            if circle:
                return circle
    return None


def check_circles(tree):
    edges = collections.defaultdict(set)
    places = {}
    for file in filter(is_product, tree.files):
        for line, _, target in tree.includes[file]:
            edge = (folder_of(file), folder_of(target or file))
            if edge[0] != edge[1]:
                edges[edge[0]].add(edge[1])
                edges[edge[1]] |= set()
                places.setdefault(edge, f"{file}:{line}")
    for back, reason in BACKWARD_INCLUDES.items():
        if back[1] not in edges[back[0]]:
            yield f"tests/includes.py: nothing in {back[0]}/ includes {back[1]}/ any more; strike it from the exceptions"
        edges[back[0]].discard(back[1])
    circle = find_circle(edges)
    if circle:
        steps = [f"  {a}/ includes {b}/ at {places[a, b]}" for a, b in zip(circle, circle[1:])]
        yield "folders include each other in a circle:\n" + "\n".join(steps)


def check_names(tree):
    folders = collections.defaultdict(list)
    for file in tree.files:
        if file.endswith((".h", ".cuh")):
            folders[file.rsplit("/", 1)[-1]].append(file)
    for name, files in folders.items():
        if len(files) > 1 and name not in SAME_FOR_TWO_DEVICES:
            yield f"{files[0]}: another header has the same name ({', '.join(files[1:])}); call one what it is"
    for name in SAME_FOR_TWO_DEVICES:
        if len(folders[name]) < 2:
            yield f"tests/includes.py: only one header is named {name}; strike it from the exceptions"


def check_sizes(tree):
    sizes = collections.Counter(folder_of(file) for file in tree.files)
    for folder, size in sizes.items():
        if size > FILES and folder not in LARGE_FOLDERS:
            yield f"{folder}/: {size} sources side by side, more than {FILES}; cut it into rooms"
    for folder in LARGE_FOLDERS:
        if sizes[folder] <= FILES:
            yield f"tests/includes.py: {folder}/ has only {sizes[folder]} sources; strike it from the exceptions"


def expand(path):
    """The paths that one with braces names: a/{b,c}.h -> a/b.h and a/c.h."""
    match = re.fullmatch(r"(.*)\{([^{}]*)\}(.*)", path)
    return [match[1] + part + match[3] for part in match[2].split(",")] if match else [path]


def check_paths(root):
    for page in PAGES:
        text = (root / page).read_text()
        folder = (root / page).parent
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            if not (folder / link).exists():
                yield f"{page}: links to {link}, which does not exist"
        for named in re.findall(r"`((?:[\w.]+/)+[\w.{,}]+/?)`", text):
            for path in expand(named):
                if not any((base / path).exists() for base in (root, folder, root / "kernels/include")):
                    yield f"{page}: names {path}, which does not exist"


def check_tests(tree):
    """The filters of docs/robustness.md: `Suite.Test*:Suite.*`, or `*Test*`."""
    tests = set()
    for file in filter(lambda name: name.endswith("_test.cc"), tree.files):
        text = (tree.root / file).read_text()
        for match in re.finditer(r"^(?:TYPED_)?TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\)", text, re.M):
            tests.add(f"{match[1]}.{match[2]}")
    page = "docs/robustness.md"
    for filters in re.findall(r"`([A-Z*][\w*./]*(?::[\w*./]+)*)`", (tree.root / page).read_text()):
        for pattern in filters.split(":"):
            named = pattern.replace("*/", "").replace("/*", "")
            if re.search(r"[.*]", named) and not any(fnmatch.fnmatchcase(test, named) for test in tests):
                yield f"{page}: names {pattern}, which is no test"


def main():
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent
    tree = Tree(root)
    rows, public = read_tables(root / "docs/design.md")
    named = {*rows, *public, *(use for uses in rows.values() for use in uses)} - set(LIBRARIES)
    errors = [f"docs/design.md: the map names {n}, which does not exist" for n in named if not any(root.glob(n))]
    for check in (check_map(tree, rows, public), check_worlds(tree), check_forbidden(tree), check_circles(tree), check_names(tree),
                  check_sizes(tree), check_paths(root), check_tests(tree)):
        errors += check
    for error in errors:
        print(error)
    print(f"{len(tree.files)} files, {len(rows)} rows: {len(errors) or 'no'} errors")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
