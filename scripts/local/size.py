"""Says how large each package is, and fails if one has grown without a word.

`scripts/sizes.txt` has a row for each package of the product and of the scripts: statements
(without docstrings), classes and names of modules of the files right in that folder; the documents
have a row in thousands of words. Lines can be made longer, and moved: statements stay as many. A
row may be raised, with a reason at its end; what has shrunk is lowered at once, so that no room is
kept for later.

    scripts/size                    compares; exit code 1 if something differs
    scripts/size --lower            lowers the rows of what has shrunk
    scripts/size --raise "reason"   writes all rows; those that have grown get the reason
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Final, Self

ROOT: Final = Path(__file__).parents[2]
TABLE: Final = ROOT / "scripts" / "sizes.txt"
PARTS: Final = ("wheel", "replica", "scripts")
DOCUMENTS: Final = ("docs", "docs/decisions")
HEAD: Final = (
    "# Package, statements, classes, names; documents, thousands of words; why it was raised"
)
_GENERATED: Final = re.compile(r"_pb2(_grpc)?\.py$")
_TABLE: Final = re.compile(r"\|[|:-]*")


@dataclass(frozen=True, slots=True)
class Size:
    """Statements, classes and names of a package, or thousands of words."""

    counts: tuple[int, ...]
    reason: str = ""

    @classmethod
    def parse(cls, words: str) -> Self:
        """Parses what stands behind a package's name."""
        match = re.fullmatch(r"((?:\s*\d+)+)\s*(.*)", words)
        if match is None:
            raise ValueError(f"a row without numbers: {words!r}")
        return cls(tuple(map(int, match[1].split())), match[2])

    def __str__(self) -> str:
        return f"{' '.join(f'{count:6}' for count in self.counts)}  {self.reason}".rstrip()


def measured(root: Path = ROOT) -> dict[str, Size]:
    """Counts everything below a checkout."""
    sizes: dict[str, list[int]] = {}
    for part in PARTS:
        for path in sorted((root / part).rglob("*.py")):
            if not _GENERATED.search(path.name):
                package = str(path.parent.relative_to(root))
                counts = sizes.setdefault(package, [0, 0, 0])
                for place, count in enumerate(counted(path.read_text(encoding="utf-8"))):
                    counts[place] += count
    found = {package: Size(tuple(counts)) for package, counts in sizes.items()}
    for name in DOCUMENTS:
        texts = (path.read_text(encoding="utf-8") for path in (root / name).glob("*.md"))
        found[name] = Size((ceil(sum(map(words, texts)) / 1000),))
    return found


def words(text: str) -> int:
    """Counts the words of a document: bars and rules of its tables are none."""
    return sum(_TABLE.fullmatch(each) is None for each in text.split())


def counted(source: str) -> tuple[int, int, int]:
    """Counts statements, classes and names of a module."""
    tree = ast.parse(source)
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    classes = sum(isinstance(node, ast.ClassDef) for node in statements)
    return (
        sum(not _is_docstring(node) for node in statements),
        classes,
        sum(len(_bound(node)) for node in tree.body),
    )


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _bound(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case _:
            return []


def read(text: str) -> dict[str, Size]:
    """Reads the table."""
    rows = (line.split(maxsplit=1) for line in text.splitlines() if not line.startswith("#"))
    return {name: Size.parse(words) for name, words in rows}


def written(sizes: Mapping[str, Size]) -> str:
    """Returns the table as it is in the file."""
    width = max(map(len, sizes))
    rows = (f"{name:{width}} {size}" for name, size in sorted(sizes.items()))
    return "\n".join((HEAD, *rows)) + "\n"


def differences(table: Mapping[str, Size], now: Mapping[str, Size]) -> Iterable[str]:
    """Yields, for each package that is not as the table says, what to do."""
    for name in sorted({*table, *now}):
        before, size = table.get(name), now.get(name)
        if size is None:
            yield f"{name} is gone: --lower"
        elif before is None:
            yield f"{name} is new, with {size}: --raise"
        elif has_grown(before, size):
            yield f"{name} has grown from {before} to {size}: make it smaller, or --raise"
        elif before.counts != size.counts:
            yield f"{name} has shrunk to {size}: --lower"


def has_grown(before: Size | None, now: Size) -> bool:
    """Whether any count is above the table's."""
    if before is None:
        return True
    return any(new > old for old, new in zip(before.counts, now.counts, strict=True))


def renewed(
    table: Mapping[str, Size], now: Mapping[str, Size], reason: str | None
) -> dict[str, Size]:
    """Returns the table that is to be written: without a reason what has grown stays as it was."""
    new: dict[str, Size] = {}
    for name, size in now.items():
        before = table.get(name)
        if not has_grown(before, size):
            assert before is not None
            new[name] = Size(size.counts, before.reason)
        elif reason is not None:
            new[name] = Size(size.counts, reason)
        elif before is not None:
            new[name] = before
    return new


def main(arguments: list[str]) -> int:
    """Compares, or writes."""
    parser = argparse.ArgumentParser(
        prog="scripts/size", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--lower", action="store_true", help="lower the rows of what has shrunk")
    parser.add_argument("--raise", dest="reason", help="write all rows; why some have grown")
    given = parser.parse_args(arguments)
    table, now = read(TABLE.read_text(encoding="utf-8")), measured()
    if given.lower or given.reason is not None:
        if given.reason is not None and not given.reason.strip():
            parser.error("--raise needs a reason")
        table = renewed(table, now, given.reason)
        TABLE.write_text(written(table), encoding="utf-8")
    found = list(differences(table, now))
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
