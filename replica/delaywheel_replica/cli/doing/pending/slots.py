"""`delaywheel slots` and `delaywheel slot`: the seconds that hold messages, and one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence
from itertools import islice
from pathlib import Path
from types import ModuleType

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.asking.connection import ask
from delaywheel_replica.cli.printing import shapes
from delaywheel_replica.cli.printing.messages import print_messages
from delaywheel_replica.cli.printing.tables import (
    print_json,
    print_ndjson,
    print_prose,
    print_table,
)
from delaywheel_replica.cli.printing.text import note, say
from delaywheel_replica.cli.reaching import Nodes
from delaywheel_replica.quantities import clock, counted, iso

SLOTS_PER_CALL = 10_000
MESSAGES_PER_CALL = 1_000


def slots(
    *,
    from_slot: int | None,
    to_slot: int | None,
    limit: int,
    data: Path | None,
    as_json: bool,
    as_ndjson: bool,
    server: Nodes,
    timeout_s: float,
) -> None:
    """Prints the counts of a cluster, or of a data folder."""
    if data is not None:
        answer = _folder().list_slots(data, from_slot or 0, to_slot)
    else:
        answer = _ask_for_slots(server, from_slot or 0, to_slot, limit, timeout_s)
    _cut(answer, limit)
    if as_json:
        print_json(shapes.slot_list(answer))
        return
    if as_ndjson:
        print_ndjson(shapes.slot_row(row, answer.progress) for row in answer.slots)
    else:
        _print_slots(answer)
    for row in answer.silent:
        note(f"not counted by {row.node}: {row.why}")
    if answer.HasField("next_slot"):
        note(f"there are more: --from {answer.next_slot}")


def _print_slots(answer: pb.ListSlotsResponse) -> None:
    pending = [shapes.pending(row, answer.progress) for row in answer.slots]
    print_table(
        ["second", "due", "pending", "written", "bytes", "copies"],
        [
            (
                *(str(row.slot), clock(row.slot), left, row.messages),
                *(row.length_bytes, row.copies),
            )
            for row, left in zip(answer.slots, pending, strict=True)
        ],
        none="no second holds messages",
    )
    print()
    messages = counted(sum(pending), "message")
    seconds = counted(sum(map(bool, pending)), "second")
    nodes = ", ".join(answer.counted_by)
    print_prose(f"pending: {messages} in {seconds}, each counted once, by {nodes}")
    if answer.HasField("progress"):
        say(f"forwarded to {iso(answer.progress.due_ms)}")


def _ask_for_slots(
    server: Nodes, from_slot: int, to_slot: int | None, limit: int, timeout_s: float
) -> pb.ListSlotsResponse:
    """Fetches all pages up to the limit, and joins them."""
    whole = _ask_for_page(server, from_slot, to_slot, limit, timeout_s)
    while whole.HasField("next_slot") and len(whole.slots) < limit:
        rest = limit - len(whole.slots)
        page = _ask_for_page(server, whole.next_slot, to_slot, rest, timeout_s)
        whole.slots.extend(page.slots)
        _add_silent(whole.silent, page.silent)
        # Who has missed a page has not counted everything.
        missed = {row.node for row in whole.silent}
        whole.counted_by[:] = [node for node in whole.counted_by if node not in missed]
        whole.ClearField("next_slot")
        if page.HasField("next_slot"):
            whole.next_slot = page.next_slot
    return whole


def _add_silent(known: MutableSequence[pb.Silence], of_page: Iterable[pb.Silence]) -> None:
    """Adds who has missed a page, each node once."""
    nodes = {row.node for row in known}
    known.extend(row for row in of_page if row.node not in nodes)


def _ask_for_page(
    server: Nodes, from_slot: int, to_slot: int | None, limit: int, timeout_s: float
) -> pb.ListSlotsResponse:
    request = pb.ListSlotsRequest(
        from_slot=from_slot,
        to_slot=to_slot,
        limit=min(limit, SLOTS_PER_CALL),
        all_members=True,
    )
    return ask(server, lambda stub: stub.ListSlots(request, timeout=timeout_s))


def _cut(answer: pb.ListSlotsResponse, limit: int) -> None:
    """Keeps the first `limit` seconds, and says where the next ones begin."""
    if len(answer.slots) > limit:
        answer.next_slot = answer.slots[limit].slot
        del answer.slots[limit:]


def slot(
    second: int,
    *,
    with_content: bool,
    limit: int,
    data: Path | None,
    as_json: bool,
    as_ndjson: bool,
    server: Nodes,
    timeout_s: float,
) -> None:
    """Prints a second's messages, page by page up to the limit."""
    silent: list[pb.Silence] = []
    if data is not None:
        stored = _folder().slot_messages(data, second, with_content=with_content)
    else:
        stored = _ask_for_messages(server, second, silent, with_content, timeout_s)
    shown = islice(stored, limit)
    if as_ndjson:
        print_ndjson(shapes.stored_message(row, with_content=with_content) for row in shown)
        _print_if_more(stored, limit, silent)
        return
    messages = list(shown)
    if as_json:
        print_json(
            {
                "slot": second,
                "messages": [
                    shapes.stored_message(message, with_content=with_content)
                    for message in messages
                ],
                "complete": next(stored, None) is None and not silent,
                "silent": [{"node": row.node, "why": row.why} for row in silent],
            }
        )
        return
    print_messages(messages, with_content=with_content, none=f"no messages in {clock(second)}")
    _print_if_more(stored, limit, silent)


def _print_if_more(
    stored: Iterator[pb.StoredMessage], limit: int, silent: Iterable[pb.Silence]
) -> None:
    for row in silent:
        note(f"not all is listed by {row.node}: {row.why}")
    if next(stored, None) is not None:
        note(f"there are more: --limit {limit * 10}")


def _folder() -> ModuleType:
    # Only here: numpy, which a cluster is asked without.
    from delaywheel_replica.cli.doing import folder  # noqa: PLC0415

    return folder


def _ask_for_messages(
    server: Nodes, second: int, silent: list[pb.Silence], with_content: bool, timeout_s: float
) -> Iterator[pb.StoredMessage]:
    """Yields pages, as far as they are consumed; notes who has not listed all, and why."""
    request = pb.GetSlotRequest(slot=second, page_size=MESSAGES_PER_CALL, with_content=with_content)
    while True:
        page = ask(server, lambda stub: stub.GetSlot(request, timeout=timeout_s))
        _add_silent(silent, page.silent)
        yield from page.messages
        request.page_token = page.next_page_token
        if not page.next_page_token:
            return
