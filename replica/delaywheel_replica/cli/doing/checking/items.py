"""What was checked: one item each, with what to do about it, and the exit code of all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from delaywheel_replica.cli.failures import ExitCode
from delaywheel_replica.cli.printing.tables import print_json, print_table
from delaywheel_replica.cli.printing.text import say


class CheckLevel(StrEnum):
    """How an item stands."""

    OK = "ok"
    WARNING = "warning"
    """The node would run, but something is missing, in danger, or could not be looked at."""
    FAULT = "fault"
    """The node would not start, not lead, or not do what its settings promise."""
    AWAY = "away"
    """Kafka did not answer: nothing behind it could be checked. Trying again may help."""


@dataclass(frozen=True, slots=True)
class CheckedItem:
    """One item, such as `broker 1` or `topic orders`; `advice` is empty if nothing is to do."""

    what: str
    level: CheckLevel
    text: str
    advice: str = ""


def ok(what: str, text: str) -> CheckedItem:
    """Returns an item that is in order."""
    return CheckedItem(what, CheckLevel.OK, text)


def warning(what: str, text: str, advice: str) -> CheckedItem:
    """Returns an item that does not keep a node from running."""
    return CheckedItem(what, CheckLevel.WARNING, text, advice)


def fault(what: str, text: str, advice: str) -> CheckedItem:
    """Returns an item that must be corrected first."""
    return CheckedItem(what, CheckLevel.FAULT, text, advice)


def lessened(item: CheckedItem) -> CheckedItem:
    """Returns a fault as a warning: the node runs without what it is about."""
    return replace(item, level=CheckLevel.WARNING) if item.level is CheckLevel.FAULT else item


def fault_of(what: str, objection: str) -> CheckedItem:
    """Returns the item of a cleaner's refusal: what is wrong, a colon, what to do."""
    text, _, advice = objection.partition(": ")
    return fault(what, text, advice)


def print_items(items: Iterable[CheckedItem], *, as_json: bool) -> ExitCode:
    """Prints all items and, for people, what to do; returns the command's exit code."""
    found = list(items)
    if as_json:
        print_json({"items": [asdict(item) for item in found]})
    else:
        print_table(("", "what", "found"), [(item.level, item.what, item.text) for item in found])
        advised = [item for item in found if item.advice]
        if advised:
            say("\nto do:")
        for item in advised:
            say(f"- {item.what}: {item.advice}")
    levels = {item.level for item in found}
    if CheckLevel.FAULT in levels:
        return ExitCode.REFUSED
    return ExitCode.UNAVAILABLE if CheckLevel.AWAY in levels else ExitCode.DONE
