"""What `delaywheel trace` shows of the ways that messages take."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_trace.index.layout import HOUR_MS, Gap
from support.clients.command import Command
from support.clients.fake_service import abort, answer
from support.clients.scripted_node import ScriptedNode
from support.wheels.indexes import QUERY, Event, IndexMaker

SENT_MS = 1_900_000_000_250
DUE_MS = 1_900_001_800_410
LATER_MS = 1_900_004_400_000
ID, NEXT = "0190163d8694739b8d3f8a4d6a1f5d10", "0190163df2a0731f8e0a4b7c9d2e6f31"
DOC = Path(__file__).parents[3] / "docs" / "TRACE.md"

SHOP = {"client": "web", "host": "checkout-7", "ip": "10.0.0.7", "release": "0.3.0"}
WORKER = {"client": "billing", "host": "worker-2", "ip": "10.0.0.9", "release": "0.3.0"}
ADMIN = {"client": None, "host": "admin-cli", "ip": "10.0.0.9", "release": "0.3.0"}


def message(id_: str = ID, due_ms: int = DUE_MS, topic: str = "orders") -> dict[str, Any]:
    return {"id": bytes.fromhex(id_), "due_ms": due_ms, "topic": topic, "cluster": "shop"}


def sent(**other: Any) -> Event:
    return {
        **message(),
        **SHOP,
        "kind": "sent",
        "status": "ACCEPTED",
        "time_ms": SENT_MS + 14,
        "cost_us": 14_000,
        "attempts": 1,
        "node": "n1.7",
        "key": "42",
        "tags": "eu,retry-me",
        **other,
    }


def accepted(**other: Any) -> Event:
    return {**message(), "time_ms": SENT_MS + 1, **other}


def processed(**other: Any) -> Event:
    return {
        **message(),
        **WORKER,
        "kind": "processed",
        "status": "DONE",
        "time_ms": DUE_MS + 33,
        "handler_us": 12_010,
        "partition": 0,
        "offset": 17,
        "forwarded_ms": other.get("due_ms", DUE_MS) + 21,
        "group": "billing",
        "attempt": 1,
        "key": "42",
        **other,
    }


def changed(what: str, status: str, **other: Any) -> Event:
    asked = {"kind": "changed", "what": what, "status": status, "slot": DUE_MS // 1000}
    return {**message(), **ADMIN, **asked, "time_ms": SENT_MS + 322_770, "cost_us": 9_000, **other}


def outcome(status: str, offset: int = 1, **other: Any) -> Event:
    place = {"reporter": "8a5be53c4d0f9d3ee1c6f6", "number": 0, "row": offset, "share": None}
    told = {**message(), "cluster": None, "kind": "outcome", "status": status, **place}
    return {**told, "dropped": None, "time_ms": DUE_MS + 20, **other}


def retried(index: IndexMaker) -> None:
    """Sent, retried once, done then."""
    again_ms, retry = DUE_MS + 30_340, "orders-retry-billing"
    after = {"to_ms": again_ms, "next_id": bytes.fromhex(NEXT), "why": "ConnectionError: refused"}
    index.batch(
        sent(),
        processed(status="RETRIED", handler_us=340_000, time_ms=DUE_MS + 373, **after),
    )
    second = {**message(NEXT, again_ms, retry), "root": ID, "attempt": 2, "offset": 4}
    index.accepted("n1.7", 1_310_398, [accepted()])
    index.hour_ms += HOUR_MS
    index.batch(processed(**second, time_ms=again_ms + 92))
    index.accepted("n2.4", 77, [accepted(**message(NEXT, again_ms, retry), time_ms=DUE_MS + 372)])


def rescheduled(index: IndexMaker) -> None:
    index.batch(sent(), changed("RESCHEDULE", "RESCHEDULED", to_ms=LATER_MS))
    index.accepted("n1.7", 1_310_398, [accepted()])
    index.accepted("n1.7", 1_310_420, [accepted(due_ms=LATER_MS, time_ms=SENT_MS + 322_768)])
    index.hour_ms += 2 * HOUR_MS
    index.batch(outcome("cancelled"), processed(**message(due_ms=LATER_MS), time_ms=LATER_MS + 46))


def decided_by_a_check(index: IndexMaker) -> None:
    """A half with a due of its own, whose sender has never said anything more."""
    letter = {"topic": "delaywheel-shop-halves", "offset": 3, "group": "shop-check", "key": None}
    letter |= {"forwarded_ms": None}
    verdict = {"status": "COMMITTED", "to_ms": LATER_MS, "time_ms": DUE_MS + 90}
    index.batch(sent(), processed(**letter, **verdict))
    index.accepted("n1.7", 1_310_398, [accepted()])
    index.accepted("n2.4", 77, [accepted(due_ms=LATER_MS, time_ms=DUE_MS + 130)])
    index.hour_ms += 2 * HOUR_MS
    index.batch(
        outcome("asked"),
        outcome("answered", 2, what="committed", time_ms=DUE_MS + 140),
        processed(**message(due_ms=LATER_MS), time_ms=LATER_MS + 46),
    )


def refused(status: str) -> Any:
    def fill(index: IndexMaker) -> None:
        index.batch(sent(status=status, node=None, cost_us=3_100, time_ms=SENT_MS + 4))

    return fill


RETRIED = """\
id 0190163d8694739b8d3f8a4d6a1f5d10  topic orders  key "42"  tags eu,retry-me
2030-03-17
17:46:40.250Z  sent       ACCEPTED in 14 ms by checkout-7 (10.0.0.7), client "web"
17:46:40.251Z  accepted   n1.7/1310398, due 2030-03-17T18:16:40.410Z
18:16:40.431Z  forwarded  21 ms late, orders/0/17
18:16:40.443Z  processed  retried after 340 ms: ConnectionError: refused, again \
2030-03-17T18:17:10.750Z (group billing, attempt 1)
18:16:40.782Z  accepted   n2.4/77, due 2030-03-17T18:17:10.750Z; \
id 0190163df2a0731f8e0a4b7c9d2e6f31; topic orders-retry-billing
18:17:10.771Z  forwarded  21 ms late, orders-retry-billing/0/4; \
id 0190163df2a0731f8e0a4b7c9d2e6f31
18:17:10.829Z  processed  done after 12 ms (group billing, attempt 2); \
id 0190163df2a0731f8e0a4b7c9d2e6f31; topic orders-retry-billing
searched: 2030-03-17T17Z to 2030-03-17T19Z, 4 files; \
programs with a trace tell of all messages; 0 events dropped; \
newest event 2030-03-17T18:17:10.842Z
clocks agree
"""
SCREENS = {
    "retried": (retried, RETRIED),
    "rescheduled": (
        rescheduled,
        """\
id 0190163d8694739b8d3f8a4d6a1f5d10  topic orders  key "42"  tags eu,retry-me
2030-03-17
17:46:40.250Z  sent       ACCEPTED in 14 ms by checkout-7 (10.0.0.7), client "web"
17:46:40.251Z  accepted   n1.7/1310398, due 2030-03-17T18:16:40.410Z
17:52:03.011Z  changed    rescheduled to 2030-03-17T19:00:00.000Z in 9 ms by admin-cli (10.0.0.9)
17:52:03.018Z  accepted   n1.7/1310420, due 2030-03-17T19:00:00.000Z
18:16:40.430Z  cancelled  due 2030-03-17T18:16:40.410Z
19:00:00.021Z  forwarded  21 ms late, orders/0/17
19:00:00.033Z  processed  done after 12 ms (group billing, attempt 1)
searched: 2030-03-17T17Z to 2030-03-17T20Z, 4 files; \
programs with a trace tell of all messages; 0 events dropped; \
newest event 2030-03-17T19:00:00.046Z
clocks agree
""",
    ),
    "decided by a check": (
        decided_by_a_check,
        """\
id 0190163d8694739b8d3f8a4d6a1f5d10  topic orders  key "42"  tags eu,retry-me
2030-03-17
17:46:40.250Z  sent       ACCEPTED in 14 ms by checkout-7 (10.0.0.7), client "web"
17:46:40.251Z  accepted   n1.7/1310398, due 2030-03-17T18:16:40.410Z
18:16:40.430Z  asked      due 2030-03-17T18:16:40.410Z
18:16:40.487Z  processed  committed after 12 ms, again 2030-03-17T19:00:00.000Z \
(group shop-check, attempt 1); topic delaywheel-shop-halves
18:16:40.540Z  accepted   n2.4/77, due 2030-03-17T19:00:00.000Z
18:16:40.550Z  answered   committed
19:00:00.021Z  forwarded  21 ms late, orders/0/17
19:00:00.033Z  processed  done after 12 ms (group billing, attempt 1)
searched: 2030-03-17T17Z to 2030-03-17T20Z, 4 files; \
programs with a trace tell of all messages; 0 events dropped; \
newest event 2030-03-17T19:00:00.046Z
clocks agree
""",
    ),
    "refused by right": (
        refused("FORBIDDEN"),
        """\
id 0190163d8694739b8d3f8a4d6a1f5d10  topic orders  key "42"  tags eu,retry-me
2030-03-17
17:46:40.250Z  sent  FORBIDDEN in 3 ms by checkout-7 (10.0.0.7), client "web"
searched: 2030-03-17T17Z to 2030-03-17T18Z, 1 file; \
programs with a trace tell of all messages; 0 events dropped; \
newest event 2030-03-17T17:46:40.254Z
clocks agree
""",
    ),
    "refused by quota": (
        refused("QUOTA_EXCEEDED"),
        """\
id 0190163d8694739b8d3f8a4d6a1f5d10  topic orders  key "42"  tags eu,retry-me
2030-03-17
17:46:40.250Z  sent  QUOTA_EXCEEDED in 3 ms by checkout-7 (10.0.0.7), client "web"
searched: 2030-03-17T17Z to 2030-03-17T18Z, 1 file; \
programs with a trace tell of all messages; 0 events dropped; \
newest event 2030-03-17T17:46:40.254Z
clocks agree
""",
    ),
}


@pytest.mark.parametrize("name", SCREENS)
def test_the_way_of_a_message(
    command: Command, node: ScriptedNode, index: IndexMaker, name: str
) -> None:
    fill, screen = SCREENS[name]
    fill(index)
    ended = command("trace", ID, "--index", index.folder.uri)
    assert ended.out == screen
    assert (ended.code, ended.err) == (0, "")
    assert node.gets or "refused" in name


def test_it_is_found_by_the_id_of_its_retry_and_by_each_place(
    command: Command, node: ScriptedNode, index: IndexMaker
) -> None:
    retried(index)
    index.merge()
    for named in (NEXT, "orders/0/17", "orders-retry-billing/0/4", f"n1.7:1900001800:{ID}:orders"):
        shown = command("trace", named, "--index", index.folder.uri).out
        assert shown.splitlines()[:8] == RETRIED.splitlines()[:8], named
    assert node.gets


def test_a_retry_of_which_nobody_has_told_is_found_by_what_was_retried(
    command: Command, index: IndexMaker
) -> None:
    index.batch(sent(), processed(status="RETRIED", next_id=bytes.fromhex(NEXT), to_ms=LATER_MS))
    shown = command("trace", NEXT, "--index", index.folder.uri).out
    assert shown.startswith(f"id {ID}  topic orders")


def test_a_moved_message_is_followed_into_the_other_clusters_index(
    command: Command, index: IndexMaker, tmp_path: Path
) -> None:
    ended = outcome("cancelled", time_ms=DUE_MS + 5)
    index.batch(sent(), changed("CANCEL", "CANCELLED"), ended)
    index.accepted("n1.7", 1_310_398, [accepted()])
    other = IndexMaker(tmp_path / "other", SENT_MS)
    moved_ms = SENT_MS + 400_000
    there = {"cluster": "mall", "reporter": "c0ffee", "root": None}
    other.batch(
        sent(**there, **ADMIN, time_ms=moved_ms, node="m1.2"),
        processed(**there, offset=9),
    )
    other.accepted("n1.7", 1_310_398, [accepted(cluster="mall", time_ms=moved_ms - 5)])
    shown = command("trace", ID, "--index", index.folder.uri, "--index", other.folder.uri).out
    steps = [re.sub(r" +", " ", line) for line in shown.splitlines() if line[:2] in ("17", "18")]
    assert [step.split()[1:2] + step.split("; ")[1:] for step in steps] == [
        ["sent"],
        ["accepted"],
        ["changed"],
        ["sent", "cluster mall"],
        ["accepted", "cluster mall"],
        ["cancelled"],
        ["forwarded", "cluster mall"],
        ["processed", "cluster mall"],
    ]
    assert f"searched: {index.folder.uri}: 2030-03-17T17Z" in shown
    assert f"searched: {other.folder.uri}: 2030-03-17T17Z" in shown


def test_what_clocks_say_otherwise_is_named_and_shown_in_its_order(
    command: Command, index: IndexMaker
) -> None:
    index.batch(sent(), processed(time_ms=SENT_MS - 5_000, forwarded_ms=None))
    index.accepted("n1.7", 1_310_398, [accepted()])
    shown = command("trace", ID, "--index", index.folder.uri).out
    order = re.findall(r"  (sent|accepted|forwarded|processed) ", shown)
    assert order == ["sent", "accepted", "forwarded", "processed"]
    assert "clocks differ by at least 5 s: n1 is ahead of worker-2" in shown
    assert "17:46:35.237Z  processed" in shown, "its own time"


def test_a_message_that_waits_is_known_by_the_nodes(
    command: Command, node: ScriptedNode, index: IndexMaker
) -> None:
    index.batch(sent())
    node.script.append(answer(pb.GetMessageResponse(message=stored(pb.MESSAGE_STATE_PENDING))))
    shown = command("trace", ID, "--index", index.folder.uri).out
    assert "accepted  n1.7/1310398, due 2030-03-17T18:16:40.410Z" in shown
    assert "now       PENDING, due 2030-03-17T18:16:40.410Z" in shown
    assert [(one.message.id_and_due.id.hex(), one.find_place) for one in node.gets] == [(ID, True)]


def test_what_no_index_knows_yet_is_searched_for_at_the_nodes(
    command: Command, node: ScriptedNode, index: IndexMaker
) -> None:
    index.batch(sent(id=bytes(16)))
    found = [stored(pb.MESSAGE_STATE_PENDING)]
    node.search = answer(pb.SearchResponse(messages=found, looked=pb.Looked(node="n1")))
    ended = command("trace", ID, "--index", index.folder.uri, "--json")
    assert ended.code == 0
    (way,) = ended.document["ways"]
    assert [step["step"] for step in way["steps"]] == ["accepted", "now"]
    ended = command("trace", "--topic", "orders", "--key", "42", "--index", index.folder.uri)
    assert ended.code == 0
    assert ID in ended.out
    assert node.asked[-1].filter.key == b"42"


@pytest.mark.parametrize("state", ["CANCELLED", "DELIVERED"])
def test_a_handle_says_the_second_in_which_nodes_still_know_what_has_ended(
    command: Command, node: ScriptedNode, index: IndexMaker, state: str
) -> None:
    """Nothing of it is in the index yet, and no search finds what does not wait any more."""
    handle = f"n1.7:{DUE_MS // 1000}:{ID}:orders"
    found = stored(getattr(pb, f"MESSAGE_STATE_{state}"))
    node.script.append(answer(pb.GetMessageResponse(message=found)))
    ended = command("trace", handle, "--index", index.folder.uri, "--json")
    assert ended.code == 0
    (way,) = ended.document["ways"]
    assert way["steps"][-1]["status" if state == "CANCELLED" else "step"] in (state, "forwarded")
    assert [(one.message.handle, one.find_place) for one in node.gets] == [(handle, True)]


def test_what_a_handle_finds_is_there_once(
    command: Command, node: ScriptedNode, index: IndexMaker
) -> None:
    found = stored(pb.MESSAGE_STATE_PENDING)
    node.script.append(answer(pb.GetMessageResponse(message=found)))
    node.search = answer(pb.SearchResponse(messages=[found], looked=pb.Looked(node="n1")))
    handle = f"n1.7:{DUE_MS // 1000}:{ID}:orders"
    (way,) = command("trace", handle, "--index", index.folder.uri, "--json").document["ways"]
    assert [step["step"] for step in way["steps"]] == ["accepted", "now"]


def fill_beyond_its_due(index: IndexMaker) -> None:
    """Puts an accepted message into an index, and an event that is later than its due."""
    index.batch(sent())
    index.accepted("n1.7", 1_310_398, [accepted()])
    index.hour_ms += HOUR_MS
    index.batch(sent(id=bytes(16), time_ms=DUE_MS + 100_000))


def test_that_it_was_forwarded_follows_from_progress_and_no_outcome(
    command: Command, node: ScriptedNode, index: IndexMaker
) -> None:
    fill_beyond_its_due(index)
    asked = ("trace", ID, "--index", index.folder.uri)
    assert "forwarded  to orders, due 2030-03-17T18:16:40.410Z" in command(*asked).out
    place = pb.KafkaPlace(topic="orders", partition=3, offset=8)
    found = stored(pb.MESSAGE_STATE_DELIVERED, place=place)
    node.script.append(answer(pb.GetMessageResponse(message=found)))
    shown = command(*asked).out
    assert "forwarded  orders/3/8, due 2030-03-17T18:16:40.410Z" in shown
    assert "now" not in shown, "it says no more"
    node.describe = abort("FORBIDDEN")
    assert "forwarded" not in command(*asked).out


def test_nothing_is_forwarded_on_the_word_of_a_clock_that_is_years_ahead(
    command: Command, node: ScriptedNode, index: IndexMaker
) -> None:
    """Its event arrived while the index had nothing else of the hour of the due yet."""
    index.batch(sent(), sent(id=bytes(16), row=1, time_ms=DUE_MS + 40_000_000_000))
    index.accepted("n1.7", 1_310_398, [accepted()])
    shown = command("trace", ID, "--index", index.folder.uri).out
    assert "forwarded" not in shown
    assert "newest event 2030-03-17T17:46:40.264Z" in shown
    assert node.described


def test_nothing_is_forwarded_for_want_of_files_that_would_say_otherwise(
    command: Command, node: ScriptedNode, index: IndexMaker
) -> None:
    """It was cancelled, and what says so is damaged, or in an hour that is not searched."""
    fill_beyond_its_due(index)
    damaged = index.batch({**message(), "kind": "outcome", "status": "cancelled"})
    Path(index.folder.full(damaged.path)).write_bytes(b"PAR1")
    asked = ("trace", ID, "--index", index.folder.uri)
    shown = command(*asked).out
    assert "FILE_UNREADABLE" in shown
    assert "forwarded  to orders" not in shown
    index.folder.delete(damaged.path)
    assert "forwarded  to orders" in command(*asked).out
    assert "forwarded  to orders" not in command(*asked, "--to", "2030-03-17T18:00Z").out
    assert "forwarded  to orders" not in command(*asked, "--from", "2030-03-17T17:50Z").out
    for gap_to_ms, follows in ((SENT_MS - 1_000, True), (SENT_MS + 1_000, False)):
        gap = Gap(0, gap_to_ms, QUERY)
        index.folder.put(gap.path, lambda stream: stream.write(b"{}"))
        assert ("forwarded  to orders" in command(*asked).out) is follows
    assert node.described


def test_what_nodes_have_beyond_the_limit_is_said_to_be_there(
    command: Command, node: ScriptedNode, index: IndexMaker
) -> None:
    index.batch(sent(id=bytes.fromhex(NEXT)))
    found, other = stored(pb.MESSAGE_STATE_PENDING), stored(pb.MESSAGE_STATE_PENDING)
    other.id = bytes(16)
    other.handle = other.handle.replace(ID, other.id.hex())
    node.search = answer(pb.SearchResponse(messages=[found, other]))
    asked = ("trace", "--key", "42", "--index", index.folder.uri, "--json")
    shown = command(*asked).document
    assert (len(shown["ways"]), shown["more"]) == (3, False)
    shown = command(*asked, "--limit", "2").document
    assert (len(shown["ways"]), shown["more"]) == (2, True)


def stored(state: pb.MessageState.ValueType, **other: Any) -> pb.StoredMessage:
    return pb.StoredMessage(
        handle=f"n1.7:{DUE_MS // 1000}:{ID}:orders",
        id=bytes.fromhex(ID),
        due_ms=DUE_MS,
        topic="orders",
        accepted_at_ms=SENT_MS + 1,
        **{"wheel": "n1.7", "seq": 1_310_398, "state": state, **other},
    )


def test_ways_of_a_key_are_rows_of_a_table(
    command: Command, node: ScriptedNode, index: IndexMaker
) -> None:
    retried(index)
    asked = ("trace", "--key", "42", "--topic", "orders", "--index", index.folder.uri)
    rows = [line.split() for line in command(*asked).out.splitlines()[:2]]
    began, ended = "2030-03-17T17:46:40.250Z", "2030-03-17T18:17:10.842Z"
    assert rows == [
        ["began", "root", "topic", "key", "steps", "last", "status", "at"],
        [began, ID, "orders", '"42"', "7", "processed", "DONE", ended],
    ]
    lines = command(*asked, "--ndjson")
    (way,) = map(json.loads, lines.out.splitlines())
    assert lines.err.startswith("searched: ")
    assert way == command(*asked, "--json").document["ways"][0]
    assert node.asked


def test_the_document_shows_a_way_and_all_fields_of_the_json(
    command: Command, node: ScriptedNode, index: IndexMaker
) -> None:
    retried(index)
    written = DOC.read_text(encoding="utf-8")
    assert f"$ delaywheel trace {ID}\n{RETRIED}" in written
    document = command("trace", ID, "--index", index.folder.uri, "--json").document
    section = written.partition("### As JSON")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+)`", section))
    (way,), (searched,) = document["ways"], document["searched"]
    assert {*document, *way, *searched} <= named
    assert {"step", "began", "time"} <= way["steps"][0].keys() & named
    assert node.gets
