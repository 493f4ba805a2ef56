"""Dead letters and ways: who may see and do what, and how the commands are run."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from grpc import ServicerContext

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.web.commands import running
from delaywheel_replica.web.commands.running import CommandRunner
from delaywheel_replica.web.refusals import PageRefusal
from support.clients.fake_service import answer, cancelled
from support.clients.page_user import PageUser, knows, page
from support.clients.scripted_node import ScriptedNode

COUNT = {"reason": "EXPIRED", "waiting": 1, "replayed": 0, "dropped": 0}
LISTED = {
    "topic": "dead",
    "letters": [{"topic": name, "place": "0:1"} for name in ("orders", "bills", None)],
    "counts": [{"topic": name, **COUNT} for name in ("orders", "bills", "")],
    "complete": True,
}
TRACED = {
    "known": True,
    "ways": [
        {
            "root": "r",
            "topic": "orders",
            "key": "42",
            "tags": None,
            "steps": [
                {"step": "sent", "topic": "orders", "key": "42"},
                {"step": "forwarded"},
                {"step": "sent", "topic": "bills", "key": "43"},
            ],
        },
        {"root": "s", "topic": "bills", "key": "43", "steps": [{"step": "sent", "key": "43"}]},
    ],
    "missing": [],
}
SETTLED = {"executed": True, "done": 2, "refused": {"TOPIC_MISSING": 1}, "refused_letters": []}
ANSWERS = {"list": LISTED, "show": {"topic": "bills"}, "replay": SETTLED, "drop": SETTLED}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, node: ScriptedNode) -> list[list[str]]:
    """The words of the commands that are run: what they print is scripted."""
    said: list[list[str]] = []

    async def run(_runner: CommandRunner, words: list[str], **_how: Any) -> Any:
        said.append(words)
        return deepcopy(TRACED if words[0] == "trace" else ANSWERS[words[1]])

    monkeypatch.setattr(CommandRunner, "run", run)
    node.describe = answer(pb.DescribeClusterResponse(kafka="k:9092", cluster_id="c"))
    node.who_am_i = knows({name: _who(*grants) for name, grants in GRANTS.items()})
    return said


GRANTS = {
    "reads": [(["read"], ["orders"])],
    "reads_all": [(["read"], ["*"])],
    "inspects": [(["inspect"], ["orders"])],
    "ops": [(["operate"], ["*"]), (["produce"], ["orders"])],
    "ops_reads": [(["operate"], ["*"]), (["read"], ["orders"]), (["produce"], ["copies"])],
}


def _who(*grants: tuple[list[str], list[str]]) -> pb.WhoAmIResponse:
    given = [pb.Grant(may=may, topics=topics) for may, topics in grants]
    return pb.WhoAmIResponse(node="n1", principal="token:x", grants=given)


@pytest.mark.parametrize(
    ("name", "command", "asked", "status"),
    [
        ("reads", "list", {}, 200),
        ("inspects", "list", {}, 403),
        ("ops", "list", {}, 403),
        ("reads", "list", {"dead_topic": "bills"}, 403),
        ("reads", "show", {"place": "0:1"}, 403),
        ("reads_all", "show", {"place": "0:1"}, 200),
        ("reads_all", "show", {}, 400),
        ("reads_all", "drop", {}, 403),
        ("ops", "drop", {}, 200),
        ("ops", "replay", {"key": "42"}, 403),
        ("ops_reads", "replay", {"key": "42"}, 403),
        ("ops_reads", "replay", {"key": "42", "topic": "orders"}, 200),
        ("ops", "replay", {"send_to": "orders"}, 403),
        ("ops_reads", "replay", {"send_to": "copies"}, 403),
        ("ops_reads", "replay", {"send_to": "copies", "topic": "orders"}, 200),
        ("ops_reads", "replay", {"send_to": "bills", "topic": "orders"}, 403),
        ("ops_reads", "replay", {"dead_topic": "bills"}, 403),
        ("ops_reads", "drop", {"dead_topic": "bills"}, 403),
        ("ops_reads", "drop", {"dead_topic": "orders"}, 200),
        ("ops", "drop", {"limit": 0}, 400),
        ("ops", "drop", {"execute": 1}, 400),
        ("ops", "drop", {"places": ["\ud800"]}, 400),
        ("ops", "drop", {"kafka": "elsewhere:9092"}, 400),
    ],
)
async def test_who_may_do_what_with_letters(
    ran: list[list[str]], user: PageUser, name: str, command: str, asked: Any, status: int
) -> None:
    await user.sign_in(name)
    assert (await user.post(f"dead/{command}", asked))[0] == status
    assert bool(ran) == (status == 200) or command == "show"


async def test_letters_of_other_topics_are_not_listed(ran: list[list[str]], user: PageUser) -> None:
    await user.sign_in("reads")
    _, found = await user.post("dead/list", {"topic": "-x", "headers": ["a=b", "c"], "limit": 7})
    assert {each["topic"] for part in ("letters", "counts") for each in found[part]} == {"orders"}
    where = ["--kafka=k:9092", "--cluster=c"]
    options = ["--topic=-x", "--header=a=b", "--header=c", "--limit=7"]
    assert ran == [["dead", "list", "--json", *where, *options]]


async def test_letters_that_were_settled_are_in_the_log_of_acts(
    ran: list[list[str]], user: PageUser
) -> None:
    await user.sign_in("ops")
    await user.post("dead/drop", {"reason": "EXPIRED"})
    await user.post("dead/drop", {"places": ["0:1"], "execute": True})
    assert ran[1][-3:] == ["--execute", "--", "0:1"]
    (act,) = (await user.get("acts"))[1]["acts"]
    assert (act["call"], act["outcome"]) == ("dead/drop", {"DONE": 2, "TOPIC_MISSING": 1})


async def test_ways_have_what_a_viewer_may_see(ran: list[list[str]], user: PageUser) -> None:
    await user.sign_in("inspects")
    assert (await user.post("trace", {"key": "42"}))[0] == 403
    _, found = await user.post("trace", {"target": "0" * 32})
    (way,) = found["ways"]
    assert (way["key"], [step["step"] for step in way["steps"]]) == (None, ["sent", "forwarded"])
    assert way["steps"][0]["key"] is None
    assert found["missing"][0]["reason"] == "FORBIDDEN"
    await user.sign_in("reads_all")
    assert (await user.post("trace", {"key": "42", "from": "now-2h"}))[1] == TRACED
    assert ran[1][-2:] == ["--key=42", "--from=now-2h"]
    await user.sign_in("ops")
    assert (await user.post("trace", {"target": "0" * 32}))[0] == 403


async def test_ways_tell_neither_why_nor_ids_of_what_a_viewer_may_not_see(
    monkeypatch: pytest.MonkeyPatch, ran: list[list[str]], user: PageUser
) -> None:
    """An error's text is content, as in a dead letter; an id belongs to its message's topic."""
    failed = {
        "kind": "processed",
        "topic": "orders",
        "why": "ValueError: '4111'",
        "extra": {"n": 1},
    }
    refused = {"kind": "outcome", "topic": "orders", "why": "TOPIC_MISSING"}
    retry = {"kind": "sent", "topic": "bills", "id": "second", "root": "first"}
    told = {
        "root": "first",
        "ids": ["first", "second"],
        "topic": "orders",
        "steps": [
            {"id": "first", "next_id": "second", **failed},
            {"id": "first", **refused},
            retry,
        ],
    }
    place = {"root": "bills/0/7", "ids": [], "topic": "bills", "steps": [failed]}
    own_place = {**place, "root": "orders/0/7", "topic": "orders"}
    monkeypatch.setitem(TRACED, "ways", [told, place, own_place])
    await user.sign_in("inspects")
    first, second, third = (await user.post("trace", {"target": "0" * 32}))[1]["ways"]
    assert (first["root"], first["ids"], first["topic"]) == ("first", ["first"], "orders")
    hidden = {"why": None, "extra": None}
    assert first["steps"][0] == {**failed, **hidden, "id": "first", "next_id": None}
    assert first["steps"][1]["why"] == "TOPIC_MISSING", "nodes tell it whoever may inspect"
    assert (second["root"], second["topic"]) == (None, None)
    assert (third["root"], third["topic"]) == ("orders/0/7", "orders")
    await user.sign_in("reads_all")
    assert (await user.post("trace", {"target": "0" * 32}))[1]["ways"] == TRACED["ways"]
    assert len(ran) == 2


async def test_read_only_counts_letters_alone(ran: list[list[str]], node: ScriptedNode) -> None:
    async with page([node.address], read_only=True, config=Path("node.toml")) as user:
        await user.sign_in("ops")
        assert (await user.post("dead/drop", {"execute": True}))[0] == 403
        assert (await user.post("dead/drop", {}))[0] == 200
    assert ran == [["dead", "drop", "--json", "--config=node.toml"]]


async def test_a_command_prints_its_json_or_why_not(
    node: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.who_am_i = answer(pb.WhoAmIResponse(node="n1", principal="token:ann"))
    ask = ["whoami", "--json", "--server", node.address]
    assert (await CommandRunner().run(ask, within_s=60))["principal"] == "token:ann"
    with pytest.raises(PageRefusal, match="unrecognized") as caught:
        await CommandRunner().run([*ask, "--wrong"], within_s=60)
    assert (caught.value.status, caught.value.reason) == (400, "USAGE")
    with pytest.raises(PageRefusal) as caught:
        await CommandRunner().run(ask, within_s=0.01)
    assert caught.value.reason == "COMMAND_TOO_SLOW"
    monkeypatch.setattr(running, "OUTPUT_AT_MOST", 10)
    with pytest.raises(PageRefusal) as caught:
        await CommandRunner().run(ask, within_s=60)
    assert caught.value.reason == "ANSWER_TOO_LARGE"
    monkeypatch.setattr(running, "AT_ONCE", 0)
    with pytest.raises(PageRefusal) as caught:
        await CommandRunner().run(ask, within_s=60)
    assert caught.value.reason == "COMMANDS_FULL"


@pytest.mark.parametrize(
    ("path", "asked", "goes_on"),
    [("trace", {}, False), ("dead/drop", {}, False), ("dead/drop", {"execute": True}, True)],
)
async def test_who_leaves_ends_their_command_unless_it_acts(
    node: ScriptedNode,
    user: PageUser,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    asked: dict[str, Any],
    goes_on: bool,
) -> None:
    node.describe = answer(pb.DescribeClusterResponse(kafka="k:9092", cluster_id="c"))
    printing = tmp_path / "command"
    printing.write_text(
        f"#!/bin/sh\ncd {tmp_path}\necho $$ >began\nuntil [ -e go ]; do sleep 0.1; done\n"
        f"echo '{json.dumps(SETTLED)}'\n"
    )
    printing.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(printing))
    await user.sign_in()
    await _leaves(user, path, asked, (tmp_path / "began").exists)
    process = Path("/proc") / (tmp_path / "began").read_text().strip()
    if not goes_on:
        await _until(lambda: not process.exists())
        return
    (tmp_path / "go").touch()
    await _until(lambda: not process.exists())
    (act,) = (await user.get("acts"))[1]["acts"]
    assert act["outcome"] == {"DONE": 2, "TOPIC_MISSING": 1}


async def test_an_act_of_who_has_left_is_noted(node: ScriptedNode, user: PageUser) -> None:
    began, goes_on = threading.Event(), threading.Event()

    def slow(service: Any, request: Any, context: ServicerContext) -> Any:
        began.set()
        assert goes_on.wait(60)
        return cancelled(pb.CANCEL_OUTCOME_CANCELLED)(service, request, context)

    node.script.append(slow)
    await user.sign_in()
    await _leaves(user, "DelayWheel/Cancel", {"messages": [{"handle": "x"}]}, began.is_set)
    goes_on.set()
    async with asyncio.timeout(60):
        while not (acts := (await user.get("acts"))[1]["acts"]):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)
    assert acts[0]["outcome"] == {"CANCELLED": 1}


async def _leaves(user: PageUser, path: str, asked: Any, under_way: Callable[[], bool]) -> None:
    """Asks, and ends the connection meanwhile."""
    asking = asyncio.create_task(user.post(path, asked))
    await _until(under_way)
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.05)


async def test_a_token_is_shown_whatever_the_words_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the target of a search its file was taken for another target."""
    said: list[list[str]] = []

    async def answered(words: list[str], _within_s: float, _files: Any) -> None:
        said.append(words)

    monkeypatch.setattr(running, "_answer", answered)
    await CommandRunner().run(["trace", "--json", "--", "0:1"], within_s=1, token="t")
    await CommandRunner().run(["trace", "--json"], within_s=1, token="t")
    assert [words[2].partition("=")[0] for words in said] == ["--token-file"] * 2
    assert said[0][3:] == ["--", "0:1"]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("dead/drop", {"places": ["--execute"]}),
        ("dead/drop", {"places": ["0:1", "--kafka=127.0.0.1:2"]}),
        ("dead/show", {"place": "--help"}),
        ("trace", {"topic": "t", "target": "--token-file=/etc/hostname"}),
        ("trace", {"topic": "t", "target": "--index=/"}),
    ],
)
async def test_what_a_viewer_says_is_no_option_of_the_command(
    node: ScriptedNode, path: str, asked: dict[str, Any]
) -> None:
    """Places were: with `--execute` a page to look at alone dropped letters."""
    node.describe = answer(pb.DescribeClusterResponse(kafka="127.0.0.1:1", cluster_id="c"))
    async with page([node.address], read_only=True) as user:
        await user.sign_in()
        status, told = await user.post(path, asked)
    assert (status, told["reason"]) == (400, "USAGE"), told
