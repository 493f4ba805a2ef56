"""`delaywheel search`: pending messages by their properties."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, TypedDict, Unpack, cast

from delaywheel.client.searching import FilterOptions, filter_of
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.asking.connection import ask
from delaywheel_replica.cli.printing import shapes
from delaywheel_replica.cli.printing.messages import print_messages
from delaywheel_replica.cli.printing.tables import print_json, print_ndjson
from delaywheel_replica.cli.printing.text import note
from delaywheel_replica.cli.reaching import Nodes
from delaywheel_replica.cli.values import bytes_given
from delaywheel_replica.quantities import clock, counted, size

_MESSAGES_PER_CALL = 1_000


class Conditions(TypedDict):
    """The conditions on the command line."""

    topic: str | None
    key: str | None
    header: tuple[str, bytes | None] | None
    message_id: bytes | None
    due_from: datetime | None
    due_to: datetime | None


def wanted_of(said: Conditions) -> pb.Filter:
    """Returns the filter for the conditions on the command line."""
    key, header = said["key"], said["header"]
    given = {
        "key": None if key is None else bytes_given(key),
        "id": said["message_id"],
        "header": header[0] if header is not None and header[1] is None else header,
        "due_from": said["due_from"],
        "due_to": said["due_to"],
    }
    options = {name: value for name, value in given.items() if value is not None}
    return filter_of(said["topic"], cast("FilterOptions", options))


def add_looked(whole: pb.Looked, page: pb.Looked) -> None:
    """Adds what was examined for the next page."""
    whole.node = page.node
    whole.messages += page.messages
    whole.length_bytes += page.length_bytes
    whole.incomplete |= page.incomplete
    whole.ClearField("to_slot")
    if page.HasField("to_slot"):
        whole.to_slot = page.to_slot


class Looking:
    """One search, page by page, with a summary of what was examined."""

    def __init__(self, request: pb.SearchRequest, server: Nodes, timeout_s: float) -> None:
        self._request = request
        self._server = server
        self._timeout_s = timeout_s
        self._looked = pb.Looked()

    def messages(self, limit: int) -> Iterator[pb.StoredMessage]:
        """Yields messages as they are consumed; no page exceeds the rest of the limit."""
        left = limit
        while left > 0:
            self._request.page_size = min(left, _MESSAGES_PER_CALL)
            page = ask(
                self._server, lambda stub: stub.Search(self._request, timeout=self._timeout_s)
            )
            add_looked(self._looked, page.looked)
            self._request.page_token = page.next_page_token
            left -= len(page.messages)
            yield from page.messages
            if not page.next_page_token:
                return

    @property
    def is_incomplete(self) -> bool:
        """Whether the node was missing frames, so that there may be more."""
        return self._looked.incomplete

    def shape(self) -> dict[str, Any]:
        """Returns the summary as JSON."""
        return shapes.of(self._looked)

    def print_looked(self) -> None:
        """Prints the summary, and where to continue."""
        looked = self._looked
        read = f"{counted(looked.messages, 'message')}, {size(looked.length_bytes)}"
        note(f"examined {read}, on {looked.node}")
        if looked.HasField("to_slot"):
            since = clock(looked.to_slot)
            note(f"not examined: messages due from {since} on; a greater --limit")
        if looked.incomplete:
            note(f"{looked.node} is missing frames: there may be more")


def search(
    *,
    with_content: bool,
    limit: int,
    as_json: bool,
    as_ndjson: bool,
    server: Nodes,
    timeout_s: float,
    **conditions: Unpack[Conditions],
) -> None:
    """Lists pending messages, page after page up to the limit."""
    asked = wanted_of(conditions)
    looking = Looking(pb.SearchRequest(filter=asked, with_content=with_content), server, timeout_s)
    shown = looking.messages(limit)
    if as_ndjson:
        print_ndjson(shapes.stored_message(row, with_content=with_content) for row in shown)
        looking.print_looked()
        return
    messages = list(shown)
    if as_json:
        print_json(
            {
                "messages": [
                    shapes.stored_message(message, with_content=with_content)
                    for message in messages
                ],
                "looked": looking.shape(),
            }
        )
        return
    print_messages(messages, with_content=with_content, none="no such message is pending")
    looking.print_looked()
