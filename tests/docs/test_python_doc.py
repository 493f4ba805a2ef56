"""docs/PYTHON.md names all that the client has: options, outcomes, errors, methods."""

import inspect
import re
from pathlib import Path

import delaywheel
from delaywheel import CancelOutcome, Client, DelaywheelError, Queue, RescheduleOutcome
from delaywheel.client.searching import FilterOptions
from delaywheel.message import MessageOptions
from local.reference import rows_of

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = (DOCS / "PYTHON.md").read_text(encoding="utf-8")


def first_column(header: str) -> set[str]:
    """The names in backquotes in the first column of a table."""
    return {name for row in rows_of(DOCUMENT, header) for name in re.findall(r"`(\w+)`", row[0])}


def test_options_of_a_message() -> None:
    assert first_column("argument") == {"value", *MessageOptions.__annotations__}


def test_outcomes() -> None:
    assert first_column("outcome") == {*CancelOutcome, *RescheduleOutcome}


def test_errors() -> None:
    public = (getattr(delaywheel, name) for name in delaywheel.__all__)
    errors = {
        each.__name__
        for each in public
        if inspect.isclass(each) and issubclass(each, DelaywheelError)
    }
    assert first_column("error") | {"DelaywheelError"} >= errors


def test_methods_and_their_options() -> None:
    document = DOCUMENT + (DOCS / "TRANSACTIONS.md").read_text(encoding="utf-8")
    methods = {name for name in vars(Client) if not name.startswith("_")}
    options = {*inspect.signature(Client).parameters} - {"addresses"}
    named = methods | options | FilterOptions.__annotations__.keys()
    assert {name for name in named if not re.search(rf"\b{name}\b", document)} == set()


def test_bounds_of_the_queue() -> None:
    queue = Queue()
    for figure in (
        f"`Queue.linger` ({queue.linger * 1000:.0f} ms)",
        f"{queue.batch_messages:,} or {queue.batch_bytes >> 20} MiB",
        f"{queue.max_messages:,} messages or {queue.max_bytes >> 20} MiB",
    ):
        assert figure in DOCUMENT
