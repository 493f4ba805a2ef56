"""What `delaywheel trace` says where something is wrong, missing, or unknown; and its exit code."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_trace.index.layout import BadFile, Gap
from delaywheel_trace.search import command as trace_command
from delaywheel_trace.search import indexes, lookups
from support.clients.command import Command
from support.clients.fake_service import abort, answer
from support.clients.scripted_node import ScriptedNode
from support.wheels.indexes import QUERY, Event, IndexMaker

SENT_MS = 1_900_000_000_250
ID, OTHER = "0190163d8694739b8d3f8a4d6a1f5d10", "0190163df2a0731f8e0a4b7c9d2e6f31"
SINCE = ("--from", "2030-03-17T17:00Z", "--to", "2030-03-17T18:00Z")
NODES_AWAY = "not shown: the nodes: UNAVAILABLE: cannot connect"


def sent(id_: str = ID, **other: Any) -> Event:
    named = {"id": bytes.fromhex(id_), "topic": "orders", "due_ms": SENT_MS + 60_000}
    return {**named, "cluster": "shop", "status": "ACCEPTED", "time_ms": SENT_MS, **other}


@pytest.fixture
def asked(index: IndexMaker) -> tuple[str, ...]:
    return ("trace", OTHER, "--index", index.folder.uri)


@pytest.mark.usefixtures("own_process")
def test_nothing_known_of_what_would_be_known_is_exit_code_1(
    command: Command, node: ScriptedNode, index: IndexMaker, asked: tuple[str, ...]
) -> None:
    index.batch(sent())
    ended = command(*asked)
    assert ended.code == 1
    assert ended.out.startswith(
        "nothing is known of it, and it would be, if a program with a trace had sent it from "
        "2030-03-17T17:00:00.000Z up to 2030-03-17T17:46:40.250Z; what others sent is not in the "
        "index yet\n"
        "searched: 2030-03-17T17Z to 2030-03-17T18Z, 1 file; "
        "programs with a trace tell of all messages; 0 events dropped;"
    )
    assert node.asked[0].filter.id == bytes.fromhex(OTHER)


def test_what_programs_without_a_trace_sent_is_known_as_far_as_the_ledger(
    command: Command, node: ScriptedNode, index: IndexMaker, asked: tuple[str, ...]
) -> None:
    index.batch(sent())
    index.accepted("n1.7", 1, [{"id": bytes.fromhex(ID), "time_ms": SENT_MS, "cluster": "shop"}])
    said = "; what others sent is known up to 2030-03-17T18:00:00.000Z\n"
    assert said in command(*asked).out
    assert node.asked


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"share": 0.01, "client": "web"}, '"web" traces 0.01 of all ways'),
        ({"dropped": 7}, "7 events dropped"),
    ],
)
def test_what_may_not_have_been_traced_is_told_apart(
    command: Command,
    node: ScriptedNode,
    index: IndexMaker,
    asked: tuple[str, ...],
    event: Event,
    said: str,
) -> None:
    index.batch(sent(**event))
    index.batch(sent(**event, number=1, row=0))  # Kafka has it twice
    ended = command(*asked)
    assert ended.code == 1
    assert ended.out.startswith("nothing is known of it, and it may not have been traced\n")
    assert said in ended.out
    assert node.asked


def test_of_a_sample_it_is_known_which_ways_are_in_it(
    command: Command, node: ScriptedNode, index: IndexMaker, asked: tuple[str, ...]
) -> None:
    """The hash of this id is below 0.9 of all."""
    index.batch(sent(share=0.9))
    assert "and it would be" in command(*asked).out
    assert node.asked


def test_gaps_and_unreadable_records_are_told(
    command: Command, node: ScriptedNode, index: IndexMaker, asked: tuple[str, ...]
) -> None:
    index.batch(sent())
    index.folder.put(Gap(SENT_MS, SENT_MS + 1_000, QUERY).path, lambda stream: stream.write(b"{}"))
    bad = BadFile(index.hour_ms, QUERY, 0, 2)
    index.folder.put(bad.path, lambda stream: stream.write(b"{}\n{}\n"))
    ended = command(*asked)
    assert "it may not have been traced" in ended.out
    assert "never read: 2030-03-17T17:46:40.250Z to 2030-03-17T17:46:41.250Z" in ended.out
    assert "2 records unreadable" in ended.out
    (searched,) = command(*asked, "--json").document["searched"]
    assert (len(searched["gaps"]), searched["bad"]) == (1, 2)
    assert node.asked


def test_nodes_that_are_away_are_named_and_the_index_is_shown(
    command: Command, index: IndexMaker, asked: tuple[str, ...]
) -> None:
    index.batch(sent())
    ended = command(*asked)
    assert (ended.code, NODES_AWAY in ended.out) == (3, True)
    ended = command("trace", ID, "--index", index.folder.uri)
    assert (ended.code, NODES_AWAY in ended.out) == (0, True)


def test_without_an_index_the_nodes_are_asked(command: Command, node: ScriptedNode) -> None:
    ended = command("trace", ID)
    assert ended.code == 1
    assert ended.out == (
        "nothing is known of it at the nodes, and no index was searched: --index\n"
    )
    assert node.asked


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("missing", "INDEX_EMPTY: no file of an index is there"),
        ("file", "INDEX_UNREADABLE"),
        ("nowhere://x/y", "INDEX_UNREADABLE"),
    ],
)
def test_an_index_that_is_none_is_named(
    command: Command, node: ScriptedNode, tmp_path: Path, place: str, reason: str
) -> None:
    (tmp_path / "file").write_text("")
    uri = place if "://" in place else str(tmp_path / place)
    ended = command("trace", ID, "--index", uri)
    assert ended.code == 3
    assert f"not shown: {uri}: {reason}" in ended.out
    assert node.asked


def test_what_nodes_may_not_show_is_named(
    command: Command, node: ScriptedNode, index: IndexMaker
) -> None:
    index.batch(sent())
    grant = pb.Grant(may=["inspect"], topics=["baskets.*"])
    node.who_am_i = answer(pb.WhoAmIResponse(node="n1", grants=[grant]))
    ended = command("trace", ID, "--index", index.folder.uri)
    assert ended.code == 0
    assert "not shown: the nodes: FORBIDDEN: you have no right 'inspect' in topic orders" in (
        ended.out
    )
    assert not node.gets
    ended = command("trace", OTHER, "--index", index.folder.uri)
    assert ended.code == 3
    assert "FORBIDDEN: only messages in topics baskets.* are shown to you" in ended.out
    node.describe = abort("FORBIDDEN")
    shown = command("trace", ID, "--index", index.folder.uri, "--json").document["missing"]
    assert [(one["part"], one["reason"]) for one in shown] == [("nodes", "FORBIDDEN")]


def test_a_file_that_is_damaged_is_named_and_the_others_are_searched(
    command: Command, node: ScriptedNode, index: IndexMaker, asked: tuple[str, ...]
) -> None:
    index.batch(sent())
    damaged = index.folder.full(index.batch(sent(OTHER)).path)
    Path(damaged).write_bytes(b"PAR1 what somebody wrote PAR1")
    ended = command("trace", ID, "--index", index.folder.uri)
    assert ended.code == 0
    assert f"not shown: {index.folder.uri}: {damaged}: FILE_UNREADABLE: " in ended.out
    assert command(*asked).code == 3
    assert node.asked


def test_a_part_that_was_taken_away_is_named_and_the_others_are_searched(
    command: Command, node: ScriptedNode, index: IndexMaker, asked: tuple[str, ...]
) -> None:
    batch = index.batch(sent())
    merged = index.merge()
    index.folder.delete(batch.path)
    index.folder.filesystem.move(
        index.folder.full(merged.path), index.folder.full(replace(merged, parts=2).path)
    )
    ended = command(*asked)
    assert ended.code == 3
    assert "FILE_MISSING: 1 of its 2 parts are gone" in ended.out
    assert command("trace", ID, "--index", index.folder.uri).code == 0
    assert node.asked


def test_files_that_are_merged_meanwhile_are_searched_where_they_are_then(
    index: IndexMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = index.batch(sent())
    listed = indexes._listed

    def merged_afterwards(*given: Any) -> Any:
        found = listed(*given)
        if not any("c-" in path for chunk in found[1] for path in chunk.request[1]):
            index.merge()
            index.folder.delete(batch.path)
        return found

    monkeypatch.setattr(indexes, "_listed", merged_afterwards)
    found = indexes.search_indexes(
        [index.folder.uri], {"id": ID}, window=None, limit=1, timeout_s=60
    )
    assert (len(found.events), found.missing, found.cut) == (1, [], "")


def test_the_newest_event_is_looked_for_in_the_newest_files(
    index: IndexMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "CHUNK_FILES", 2)
    for number in range(12):
        index.batch(sent(time_ms=SENT_MS + number))
    found = indexes.search_indexes(
        [index.folder.uri], {"id": ID}, window=None, limit=1, timeout_s=60
    )
    assert found.indexes[0].newest_ms == SENT_MS + 11


SLOW = "import sys, time\nprint('{\"chunk\": 1}', flush=True)\ntime.sleep(600)"
FAILING = "import sys\nsys.exit('MemoryError: no more')"


@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize(
    ("program", "said"),
    [
        (SLOW, "the time is over: what was found was not followed to its end; a longer --timeout"),
        (FAILING, "the process of the search has failed (MemoryError: no more): 0 of 1 files"),
    ],
)
def test_a_search_that_does_not_end_says_how_far_it_came(
    command: Command,
    node: ScriptedNode,
    index: IndexMaker,
    asked: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    program: str,
    said: str,
) -> None:
    index.batch(sent())
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!{sys.executable}\n{program}\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    ended = command(*asked, "--timeout", "2s")
    assert ended.code == 3
    assert f"not shown: indexes: CUT: {said}" in ended.out
    assert "which share is traced, and what was dropped, is unknown" in ended.out
    assert node.asked or program == SLOW


def test_the_process_has_no_more_memory_than_it_may(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _what, both: limits.append(both))
    request = {"chunks": [], "id": ID, "columns": {"id": "BLOB"}, "identity": [], "limit": 1}
    monkeypatch.setattr(sys, "stdin", Stdin(json.dumps(request).encode()))
    lookups.main()
    assert limits == [(512 << 20, 512 << 20)]
    assert capsys.readouterr().out == '{"end": 1}\n'


class Stdin:
    def __init__(self, content: bytes) -> None:
        self.buffer = self
        self._content = content

    def read(self) -> bytes:
        return self._content


def test_more_than_the_limit_is_said_to_be_there(
    command: Command, node: ScriptedNode, index: IndexMaker
) -> None:
    index.batch(*(sent(f"{n:032x}", key="42", time_ms=SENT_MS + n) for n in range(1, 9)))
    asked = ("trace", "--key", "42", "--index", index.folder.uri, "--limit", "3", "--json")
    shown = command(*asked).document
    assert [way["root"] for way in shown["ways"]] == [f"{n:032x}" for n in (6, 7, 8)], "the latest"
    assert shown["more"]
    assert node.asked


@pytest.mark.parametrize("named", ["--topic", "--tag", "--status", "--group"])
def test_what_needs_a_time_gets_the_last_hour_and_says_so(
    command: Command, node: ScriptedNode, index: IndexMaker, named: str
) -> None:
    index.batch(sent(tags="x", status="x", group="x"))
    asked = ("trace", named, "orders" if named == "--topic" else "x", "--index", index.folder.uri)
    ended = command(*asked)
    assert (ended.code, "of the last hour: --from and --to" in ended.out) == (1, True)
    ended = command(*asked, "--from", "2030-03-17T17:00Z", "--to", "2030-03-17T18:00Z")
    assert (ended.code, "of the last hour" in ended.out) == (0, False)
    assert node.described


def test_what_may_be_there_without_being_told_is_not_claimed(
    command: Command, node: ScriptedNode, index: IndexMaker
) -> None:
    """A key may be hashed or left out, a tag not told, a place read by another program."""
    index.batch(sent(key="\\h00"))
    for named in (
        ("--key", "42"),
        ("orders/0/17",),
        ("--tag", "eu", *SINCE),
    ):
        ended = command("trace", *named, "--index", index.folder.uri)
        assert ended.code == 1
        assert ended.out.startswith("nothing is known of it, and it may not have been traced\n")
    assert node.asked


def test_an_index_does_not_claim_what_was_before_it(
    command: Command, node: ScriptedNode, index: IndexMaker, asked: tuple[str, ...]
) -> None:
    """Older hours are deleted."""
    index.batch(sent())
    ended = command(*asked, "--from", "2030-03-10T00:00Z")
    assert "had sent it from 2030-03-17T17:00:00.000Z up to" in ended.out
    assert "searched: 2030-03-17T17Z to 2030-03-17T18Z" in ended.out
    assert node.asked


def test_a_long_key_does_not_widen_the_table(
    command: Command, node: ScriptedNode, index: IndexMaker
) -> None:
    key = "k" * 200
    index.batch(sent(key=key), sent(OTHER, key="42"))
    asked = ("trace", "--topic", "orders", *SINCE, "--index", index.folder.uri)
    shown = command(*asked).out
    assert f'"{"k" * 38}…  ' in shown
    assert '"42"' in shown
    assert key in {way["key"] for way in command(*asked, "--json").document["ways"]}
    assert node.asked


def test_a_due_that_no_calendar_has_is_shown(
    command: Command, node: ScriptedNode, index: IndexMaker
) -> None:
    """Any program may write one."""
    index.batch(sent(due_ms=10**18), sent(due_ms=-(2**63)))
    ended = command("trace", ID, "--index", index.folder.uri)
    assert (ended.code, ended.out.count("ACCEPTED")) == (0, 2)
    assert node.described


def test_texts_of_others_make_no_lines_of_their_own(
    command: Command, node: ScriptedNode, index: IndexMaker
) -> None:
    forged = "x\n17:46:41.000Z  processed  done"
    told = {"tags": forged, "why": forged, "group": forged, "host": forged, "topic": forged}
    index.batch(sent(**told), sent(**told, kind="processed", number=7))
    lines = command("trace", ID, "--index", index.folder.uri).out.splitlines()
    assert not [line for line in lines if line.startswith("17:46:41.000Z")]
    assert node.described


@pytest.mark.parametrize("tag", ["eu", "eu,vip", "\\d", "x" * 199])
def test_a_tag_is_found_as_it_was_given(
    command: Command, node: ScriptedNode, index: IndexMaker, tag: str
) -> None:
    """The first of many, of which no more than 200 bytes are told; and all that there are."""
    from delaywheel.trace.texts import short_text  # noqa: PLC0415

    index.batch(sent(tags="eu,vip"), sent(OTHER, tags=short_text(f"{tag},{'y' * 300}".encode())))
    asked = ("trace", "--tag", tag, *SINCE, "--index", index.folder.uri)
    shown = command(*asked).out
    assert (ID in shown) == ("eu" in tag)
    assert (OTHER in shown) == (tag != "eu,vip")
    assert node.described


WRONG = {
    "no target": ((), "say an ID, a PLACE, or some of --key"),
    "both": ((ID, "--key", "42"), "say an ID, a PLACE, or some of --key"),
    "no id": (("0190",), "'0190' is no id: 32 hex digits, or a UUID"),
    "no place": (("orders/0",), "'orders/0' is no id"),
    "a place beyond all": (("orders/0/9999999999999999999",), "no partition or offset"),
    "no text": (("--tag", "\udcff"), "--tag is not UTF-8"),
    "a range that is none": (("--key", "1", "--from", "now", "--to", "now-1h"), "--from is not"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_usage_is_exit_code_2(command: Command, name: str) -> None:
    arguments, said = WRONG[name]
    ended = command("trace", *arguments)
    assert ended.code == 2
    assert said in ended.err


NASTY = "x'); DROP TABLE events; --\x1b[2J*?[a]"


def test_text_of_others_is_neither_sql_nor_a_terminals(
    command: Command, node: ScriptedNode, tmp_path: Path
) -> None:
    index = IndexMaker(tmp_path / "a*[b]?'", SENT_MS)
    index.batch(sent(key=NASTY, tags=NASTY, status=NASTY, group=NASTY, root=NASTY))
    for option in ("--key", "--tag", "--status", "--group"):
        since = ("--from", "2030-03-17T17:00Z", "--to", "2030-03-17T18:00Z")
        ended = command("trace", option, NASTY, "--index", index.folder.uri, *since)
        assert ended.code == 0, option
        assert "\x1b" not in ended.out
    assert node.described


@pytest.mark.parametrize("key", ["k" * 1_000_000, "\udcff\udcfe", "\\d", ""])
def test_any_key_is_found_as_it_is_written(
    command: Command, node: ScriptedNode, index: IndexMaker, key: str
) -> None:
    from delaywheel.trace.texts import short_text  # noqa: PLC0415

    index.batch(sent(key=short_text(key.encode(errors="surrogateescape"))))
    ended = command("trace", "--key", key, "--index", index.folder.uri)
    assert ended.code == 0
    assert ID in ended.out
    assert node.asked


def test_a_hashed_key_is_found_by_the_secret_of_the_profile(
    command: Command, index: IndexMaker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from delaywheel.trace.texts import hashed  # noqa: PLC0415

    profiles = tmp_path / "delaywheel" / "profiles.toml"
    profiles.parent.mkdir()
    profiles.touch(0o600)
    profiles.write_text('[prod.trace]\nkey = "hash"\nsecret = "s"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    index.batch(sent(key=hashed(b"42", b"s")))
    asked = ("trace", "--key", "42", "--index", index.folder.uri)
    assert ID in command(*asked, "--profile", "prod").out
    assert ID not in command(*asked).out


def test_the_index_may_be_named_by_the_environment(
    command: Command, index: IndexMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.batch(sent())
    monkeypatch.setenv("DELAYWHEEL_INDEX", f"{index.folder.uri},/nowhere")
    ended = command("trace", ID)
    assert ended.code == 0
    assert "not shown: /nowhere: INDEX_EMPTY" in ended.out


def test_what_searches_must_be_installed(
    command: Command, index: IndexMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_command, "find_spec", lambda _: None)
    ended = command("trace", ID, "--index", index.folder.uri)
    assert (ended.code, "install delaywheel[trace-search]" in ended.err) == (3, True)
