"""`delaywheel slots` and `delaywheel slot`: the seconds that hold messages, and what is in one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Annotated

import typer

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli import folder, shapes
from delaywheel_replica.cli.connection import ask
from delaywheel_replica.cli.options import (
    DEFAULT_SERVER,
    DEFAULT_TIMEOUT_S,
    AsJson,
    DataFolder,
    Server,
    Timeout,
)
from delaywheel_replica.cli.output import bytes_text, print_json, print_table
from delaywheel_replica.cli.values import clock, iso, parse_second

SLOTS_PER_CALL = 10_000
MESSAGES_PER_CALL = 1_000


def slots(
    from_text: Annotated[
        str | None,
        typer.Option("--from", metavar="SECOND", help="From this second: Unix, or ISO 8601."),
    ] = None,
    to_text: Annotated[
        str | None, typer.Option("--to", metavar="SECOND", help="Before this second.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many seconds.")] = 1000,
    data: DataFolder = None,
    server: Server = DEFAULT_SERVER,
    as_json: AsJson = False,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """List the seconds that hold messages, of all nodes: each message once.

    Counts are as written: what was forwarded stays listed until its slot file is deleted, a
    while after its second, and a message sent twice counts twice until its due. Copies: so many
    nodes hold as much of the second as is told.
    """
    from_slot = parse_second(from_text) if from_text is not None else 0
    to_slot = parse_second(to_text) if to_text is not None else None
    if data is not None:
        answer = folder.list_slots(data, from_slot, to_slot)
    else:
        answer = _ask_for_slots(server, from_slot, to_slot, limit, timeout_s)
    _cut(answer, limit)
    if as_json:
        print_json(shapes.slot_list(answer))
        return
    print_table(
        ["second", "due", "messages", "bytes", "frames", "cancels", "wheels", "copies"],
        [
            (
                *(str(row.slot), clock(row.slot), row.messages, row.length_bytes),
                *(row.frames, row.cancels, row.wheels, row.copies),
            )
            for row in answer.slots
        ],
    )
    print()
    total = sum(row.messages for row in answer.slots)
    nodes = ", ".join(answer.counted_by)
    print(f"{total:,} messages in {len(answer.slots):,} seconds, each counted once, by {nodes}")
    for row in answer.silent:
        print(f"not counted by {row.node}: {row.why}")
    if answer.HasField("progress"):
        print(f"forwarded to {iso(answer.progress.due_ms)}")
    if answer.HasField("next_slot"):
        print(f"there are more: --from {answer.next_slot}")


def _ask_for_slots(
    server: str, from_slot: int, to_slot: int | None, limit: int, timeout_s: float
) -> pb.ListSlotsResponse:
    """All pages up to the limit, joined."""
    whole = _ask_for_page(server, from_slot, to_slot, limit, timeout_s)
    while whole.HasField("next_slot") and len(whole.slots) < limit:
        rest = limit - len(whole.slots)
        page = _ask_for_page(server, whole.next_slot, to_slot, rest, timeout_s)
        whole.slots.extend(page.slots)
        _join(whole, page)
        whole.ClearField("next_slot")
        if page.HasField("next_slot"):
            whole.next_slot = page.next_slot
    return whole


def _join(whole: pb.ListSlotsResponse, page: pb.ListSlotsResponse) -> None:
    """Who missed a page has not counted everything."""
    known = {row.node for row in whole.silent}
    whole.silent.extend(row for row in page.silent if row.node not in known)
    missed = {row.node for row in whole.silent}
    whole.counted_by[:] = [node for node in whole.counted_by if node not in missed]


def _ask_for_page(
    server: str, from_slot: int, to_slot: int | None, limit: int, timeout_s: float
) -> pb.ListSlotsResponse:
    request = pb.ListSlotsRequest(
        from_slot=from_slot,
        to_slot=to_slot,
        limit=min(limit, SLOTS_PER_CALL),
        all_members=True,
    )
    return ask(server, lambda stub: stub.ListSlots(request, timeout=timeout_s))


def _cut(answer: pb.ListSlotsResponse, limit: int) -> None:
    """Leaves the first `limit` seconds and says where the next ones begin."""
    if len(answer.slots) > limit:
        answer.next_slot = answer.slots[limit].slot
        del answer.slots[limit:]


def slot(
    second_text: Annotated[
        str, typer.Argument(metavar="SECOND", help="Unix seconds, or ISO 8601 with zone.")
    ],
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many messages.")] = 100,
    with_content: Annotated[
        bool, typer.Option("--content", help="With keys, values and headers.")
    ] = False,
    data: DataFolder = None,
    server: Server = DEFAULT_SERVER,
    as_json: AsJson = False,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """List the messages of one second, as one node sees them."""
    second = parse_second(second_text)
    if data is not None:
        stored = folder.slot_messages(data, second, with_content=with_content)
    else:
        stored = _ask_for_messages(server, second, with_content=with_content, timeout_s=timeout_s)
    messages = list(islice(stored, limit + 1))
    is_cut = len(messages) > limit
    del messages[limit:]
    if as_json:
        print_json(
            {
                "slot": second,
                "messages": [
                    shapes.stored_message(message, with_content=with_content)
                    for message in messages
                ],
                "complete": not is_cut,
            }
        )
        return
    columns = ["handle", "due", "topic", "state", "bytes"]
    print_table(
        [*columns, "key", "value"] if with_content else columns,
        [_message_cells(message, with_content=with_content) for message in messages],
    )
    if is_cut:
        print(f"there are more: --limit {limit * 10}")


def _message_cells(message: pb.StoredMessage, *, with_content: bool) -> list[object]:
    shape = shapes.stored_message(message, with_content=False)
    lengths = (
        message.key_length_bytes,
        message.value_length_bytes,
        message.headers_length_bytes,
    )
    cells = [
        *(message.handle, shape["due"], message.topic, shape["state"]),
        sum(max(length, 0) for length in lengths),
    ]
    if with_content:
        cells.append(bytes_text(message.key if message.HasField("key") else None))
        cells.append(bytes_text(message.value if message.HasField("value") else None))
    return cells


def _ask_for_messages(
    server: str, second: int, *, with_content: bool, timeout_s: float
) -> Iterator[pb.StoredMessage]:
    """Page after page, as far as they are taken."""
    request = pb.GetSlotRequest(slot=second, page_size=MESSAGES_PER_CALL, with_content=with_content)
    while True:
        page = ask(server, lambda stub: stub.GetSlot(request, timeout=timeout_s))
        yield from page.messages
        request.page_token = page.next_page_token
        if not page.next_page_token:
            return
