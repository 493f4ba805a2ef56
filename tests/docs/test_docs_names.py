"""Everything that the documents name exists: files of the tree, links, headings."""

import ast
import builtins
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
PACKAGES = ("proto", "wheel", "replica", "scripts", "tests")

_MODULE = re.compile(r"`([a-z_/]*?)([a-z_0-9]+\.py)`")
_MODULE_IN_CODE = re.compile(r"(?<![\w/])[\w/]+\.py\b")
_CLASS = re.compile(r"^ *class (\w+)[(:]", re.MULTILINE)
_TYPE = re.compile(r"^([A-Z][a-z]\w*)(?:: [^=\n]+)? = (?![\w.]+\()", re.MULTILINE)
_IMPORTED = re.compile(r"^ *(?:from \S+ )?import (\([^)]*\)|.*)", re.MULTILINE)
_NAME = re.compile(r"[\w.]+")
_RAISED = re.compile(r"^    ([\w.]+):", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@cache
def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as websites derive them."""
    headings = _HEADING.findall(document.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(scope="module")
def there() -> set[str]:
    """Returns the paths of all modules, and each way to leave out folders that they begin with."""
    found = set[str]()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        found.update("/".join(parts[first:]) for first in range(len(parts)))
    return found


# One test for all documents, as each test costs more than what it looks at here.
def test_modules_are_there(there: set[str]) -> None:
    for document in DOCS:
        for folder, name in _MODULE.findall(document.read_text(encoding="utf-8")):
            assert f"{folder.lstrip('/')}{name}" in there, f"{document}: {folder}{name}"


@pytest.mark.parametrize("package", ["wheel", "replica"])
def test_modules_that_code_names_are_there(package: str, there: set[str]) -> None:
    for path in (ROOT / package).rglob("*.py"):
        for name in _MODULE_IN_CODE.findall(path.read_text(encoding="utf-8")):
            assert name in there, f"{path}: {name}"


@pytest.mark.parametrize("package", ["wheel/delaywheel", "replica/delaywheel_replica"])
def test_exceptions_that_docstrings_name_are_known_in_their_room(package: str) -> None:
    known: dict[str, set[str]] = {}
    raised: list[tuple[str, str]] = []
    for path in (ROOT / package).rglob("*.py"):
        room = path.relative_to(ROOT / package).parts[0]
        names = known.setdefault(room, set(dir(builtins)))
        text = path.read_text(encoding="utf-8")
        names.update(_CLASS.findall(text))
        names.update(name for each in _IMPORTED.findall(text) for name in _NAME.findall(each))
        if "Raises:\n" not in text:
            continue  # to parse all of them takes five seconds
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                section = (ast.get_docstring(node) or "").partition("Raises:\n")[2]
                raised += [(room, name) for name in _RAISED.findall(section)]
    assert raised
    assert [each for each in raised if not is_known(each[1], known[each[0]])] == []


def is_known(name: str, known: set[str]) -> bool:
    """Whether a name is one of these, or one of the module that it begins with."""
    module, _, name_there = name.rpartition(".")
    return hasattr(importlib.import_module(module), name_there) if module else name in known


def test_links_lead_somewhere() -> None:
    for document in DOCS:
        for target in _LINK.findall(document.read_text(encoding="utf-8")):
            if target.startswith("https://"):
                continue
            path, _, anchor = target.partition("#")
            linked = document.parent / path if path else document
            assert linked.exists(), f"{document}: {target}"
            assert not anchor or anchor in anchors(linked), f"{document}: {target}"


def rooms(top: Path, depth: int = 0) -> Iterator[tuple[int, Path]]:
    """Packages below a folder, each with how deep it lies."""
    yield depth, top
    for folder in sorted(path.parent for path in top.glob("*/__init__.py")):
        yield from rooms(folder, depth + 1)


_TOPS = (
    "wheel/delaywheel",
    "replica/delaywheel_replica",
    "scripts/delaywheel_audit",
    "scripts/delaywheel_trace",
    "scripts/local",
    "tests/sim",
    "tests/support",
)
ROOMS = [room for top in _TOPS for room in rooms(ROOT / top)]


def test_rooms_are_listed_with_what_they_say_of_themselves() -> None:
    reported = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    listing = reported.partition("## Rooms")[2].split("```")[1].strip().splitlines()
    expected = []
    for depth, room in ROOMS:
        if depth > (0 if room.is_relative_to(ROOT / "tests") else 1):
            continue  # what is in the rooms of tests their own first lines say
        name = room.name if depth else room.relative_to(ROOT).as_posix()
        says = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8")))
        expected.append((f"{'    ' * depth}{name}/", (says or "").splitlines()[0]))
    assert [tuple(re.split(r"(?<=/)  +", line, maxsplit=1)) for line in listing] == expected


@pytest.mark.parametrize("room", [room for _, room in ROOMS], ids=lambda path: path.name)
def test_a_room_can_be_seen_at_a_glance(room: Path) -> None:
    modules = [path for path in room.glob("*.py") if path.stem != "__init__"]
    assert 2 < len(modules) <= 12 or (not modules and any(room.glob("*/__init__.py")))


def test_no_folder_of_tests_is_long() -> None:
    modules = Counter(
        path.parent
        for path in (ROOT / "tests").rglob("*.py")
        if path.stem not in {"__init__", "conftest"}
    )
    assert {folder: count for folder, count in modules.items() if count > 12} == {}


@pytest.mark.parametrize("way", ["Accepting", "Forwarding", "Cancelling"])
def test_a_messages_way_is_at_most_twelve_files(way: str) -> None:
    reported = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = reported.partition(f"### {way}\n\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    assert [row[0] for row in rows] == [str(step) for step in range(1, len(rows) + 1)]
    assert 3 < len({row[1] for row in rows}) == len(rows) <= 12


_OF_BOTH_MACHINES = {"Effect", "Event"}  # of the election and of the member, each in its own room


def test_a_name_of_a_class_or_type_stands_once() -> None:
    found: dict[str, set[Path]] = {}
    for package in ("wheel", "replica"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            # A type that is made by a call is a variable, or another name: its module's own affair.
            for name in {*_CLASS.findall(text), *_TYPE.findall(text)}:
                found.setdefault(name, set()).add(path)
    assert {
        name: paths
        for name, paths in found.items()
        if len(paths) > 1 and name not in _OF_BOTH_MACHINES
    } == {}
