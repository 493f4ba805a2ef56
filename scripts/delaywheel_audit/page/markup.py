"""Elements of the page: a tree that escapes whatever is put into it, written as HTML."""

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
    """An element. `class_` is class, `aria_label` aria-label; None and False leave one out."""
    element = ET.Element(name)
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        text = "" if value is True else visible(str(value))
        element.set(key.rstrip("_").replace("_", "-"), text)
    add(element, *children)
    return element


def add(parent: Element, *children: Child) -> None:
    """Puts children, texts among them, behind those an element has."""
    for child in children:
        if isinstance(child, Element):
            parent.append(child)
        elif child is not None:
            _add_text(parent, visible(str(child)))


def style(sheet: str) -> Element:
    """A style sheet, which no escaping may touch."""
    element = ET.Element("style")
    element.text = sheet
    return element


def prose(text: str) -> Iterator[Child]:
    """A sentence with `code` in backticks, as children of an element."""
    for number, part in enumerate(_CODE.split(text)):
        if part:
            yield el("code", part) if number % 2 else part


def table(
    heads: Iterable[Child], rows: Iterable[Iterable[Child]], *, class_: str, caption: str
) -> Element:
    """A table in a frame of its own, which scrolls where the page is narrow."""
    head = el("tr", *(el("th", name, scope="col") for name in heads))
    lines = (el("tr", *(_cell(value) for value in row)) for row in rows)
    whole = el("table", el("caption", caption), el("thead", head), el("tbody", *lines))
    # Can be scrolled by keyboard: it has a name and takes the focus.
    frame = {"role": "region", "tabindex": 0, "aria_label": caption}
    return el("div", whole, class_=f"frame {class_}", **frame)


def details(title: str, *parts: Child) -> Element:
    """What is shown when it is asked for."""
    return el("details", el("summary", title), *parts)


def visible(text: str) -> str:
    r"""The same, with characters that nobody can see as \x00 or \u202e."""
    return _UNSEEN.sub(_escape, text)


def to_html(root: Element) -> str:
    """The document."""
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
