"""Elements of the page: a tree that escapes its texts and is written as HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from xml.etree import ElementTree as ET

Element = ET.Element
Child = Element | str | int | None

# Would be invisible, turn the line around, or be refused by parsers: shown as escapes instead.
_UNSEEN = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufffe\uffff\ud800-\udfff]"
)
_CODE = re.compile(r"`([^`]+)`")


def el(name: str, /, *children: Child, **attributes: object) -> Element:
    """Makes an element; `class_` becomes class, and attributes of None or False are omitted."""
    element = ET.Element(name)
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        text = "" if value is True else visible(str(value))
        element.set(key.rstrip("_").replace("_", "-"), text)
    add(element, *children)
    return element


def add(parent: Element, *children: Child) -> None:
    """Appends children, including texts."""
    for child in children:
        if isinstance(child, Element):
            parent.append(child)
        elif child is not None:
            _add_text(parent, visible(str(child)))


def style(sheet: str) -> Element:
    """Makes a style sheet, whose text is not escaped."""
    element = ET.Element("style")
    element.text = sheet
    return element


def prose(text: str) -> Iterator[Child]:
    """Makes an element's children from a sentence with `code` in backticks."""
    for number, part in enumerate(_CODE.split(text)):
        if part:
            yield el("code", part) if number % 2 else part


def table(
    heads: Iterable[Child], rows: Iterable[Iterable[Child]], *, class_: str, caption: str
) -> Element:
    """Makes a table in its own frame, which scrolls on narrow pages."""
    head = el("tr", *(el("th", name, scope="col") for name in heads))
    lines = (el("tr", *(_cell(value) for value in row)) for row in rows)
    whole = el("table", el("caption", caption), el("thead", head), el("tbody", *lines))
    # Can be scrolled by keyboard: it has a name and takes the focus.
    frame = {"role": "region", "tabindex": 0, "aria_label": caption}
    return el("div", whole, class_=f"frame {class_}", **frame)


def details(title: str, *parts: Child) -> Element:
    """Makes a part that is shown on request."""
    return el("details", el("summary", title), *parts)


def visible(text: str) -> str:
    r"""Returns the text with invisible characters as \x00 or \u202e."""
    return _UNSEEN.sub(_escape, text)


def to_html(root: Element) -> str:
    """Writes the document as HTML."""
    return "<!DOCTYPE html>\n" + ET.tostring(root, encoding="unicode", method="html") + "\n"


def _cell(value: Child) -> Element:
    if isinstance(value, Element) and value.tag in ("td", "th"):
        return value
    return el("td", value)


def _add_text(parent: Element, text: str) -> None:
    if len(parent):
        parent[-1].tail = (parent[-1].tail or "") + text
    else:
        parent.text = (parent.text or "") + text


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
