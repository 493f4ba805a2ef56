"""What the documents name is there: files of the tree, links, headings."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
PACKAGES = ("proto", "wheel", "replica", "scripts", "tests")

_MODULE = re.compile(r"`([a-z_/]*?)([a-z_0-9]+\.py)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as they are made from them on the web."""
    headings = _HEADING.findall(document.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_modules_are_there(document: Path) -> None:
    there = [path.as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    for folder, name in _MODULE.findall(document.read_text(encoding="utf-8")):
        assert any(path.endswith(f"/{folder}{name}") for path in there), f"{folder}{name}"


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in _LINK.findall(document.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = document.parent / path if path else document
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("room", ["server", "peers", "cleaner"])
def test_every_module_of_a_room_has_its_place(room: str) -> None:
    told = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = told.partition(f"**`{room}/`**")[2].partition("**`")[0]
    modules = (ROOT / "replica" / "delaywheel_replica" / room).glob("*.py")
    assert {name for _, name in _MODULE.findall(section)} == {
        module.name for module in modules if module.stem != "__init__"
    }
