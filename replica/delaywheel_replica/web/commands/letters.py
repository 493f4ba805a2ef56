"""`POST /api/v1/dead/<command>`: the commands `delaywheel dead`, each with its JSON.

Nodes are not asked about letters, so the page judges here, by what they grant the viewer
(docs/PAGE.md). `list` neither lists nor counts letters that the viewer may not `read`, by the topic
that each was to go to; `dead_topic` may be any topic of Kafka, so it needs `read` there too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, Final

from aiohttp import web

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.rights import Right, Rights
from delaywheel_replica.web.acts import ActLog
from delaywheel_replica.web.calls import METHODS, body_of
from delaywheel_replica.web.commands.running import CommandRunner
from delaywheel_replica.web.commands.words import Fields, malformed, parsed, words
from delaywheel_replica.web.guard import viewer_of
from delaywheel_replica.web.nodes import NodeCalls, Viewer
from delaywheel_replica.web.refusals import PageRefusal, forbidden
from delaywheel_replica.web.settings import PageSettings

_DESCRIBE: Final = METHODS["DelayWheel/DescribeCluster"]
_WITHIN_S: Final = 60.0
_SETTLED_WITHIN_S: Final = 600.0
_WHERE: Final[Fields] = {"dead_topic": str, "halves_of": str}
_SELECTED: Final[Fields] = {
    **dict.fromkeys(("topic", "reason", "from", "to", "id", "key"), str),
    "headers": list,
    "limit": int,
    **_WHERE,
}
_SETTLED: Final[Fields] = {**_SELECTED, "places": list, "execute": bool}
COMMANDS: Final[Mapping[str, Fields]] = {
    "list": {**_SELECTED, "all": bool, "counts": bool},
    "show": {"place": str, **_WHERE},
    "replay": {**_SETTLED, "send_to": str, "as_new": bool},
    "drop": _SETTLED,
}


class LetterRoutes:
    """Answers for dead letters."""

    def __init__(
        self, settings: PageSettings, nodes: NodeCalls, runner: CommandRunner, acts: ActLog
    ) -> None:
        self._settings: Final = settings
        self._nodes: Final = nodes
        self._runner: Final = runner
        self._acts: Final = acts

    async def dead(self, request: web.Request) -> web.Response:
        """Runs a command."""
        command = request.match_info["command"]
        viewer = viewer_of(request)
        rights = await self._nodes.rights(viewer)  # of whom a node does not know no body is read
        asked = parsed(await body_of(request), COMMANDS[command])
        if command in {"replay", "drop"}:
            settling: Awaitable[Any] = self._settle(command, asked, viewer, rights)
            if asked.get("execute"):
                settling = asyncio.shield(settling)
            return web.json_response(await settling)
        if not rights.may_somewhere(Right.READ):
            raise forbidden(Right.READ)
        _refuse_without(rights, Right.READ, asked.get("dead_topic"))
        if command == "show":
            if "place" not in asked:
                raise malformed("place: PARTITION:OFFSET")
            letter = await self._run(
                "show", {"places": [asked.pop("place")], **asked}, viewer, _WITHIN_S
            )
            _refuse_without(rights, Right.READ, letter["topic"] or "")
            return web.json_response(letter)
        found = await self._run("list", asked, viewer, _WITHIN_S)
        for part in ("letters", "counts"):
            found[part] = [
                each for each in found[part] if rights.may(Right.READ, each["topic"] or "")
            ]
        return web.json_response(found)

    async def _settle(
        self, command: str, asked: dict[str, Any], viewer: Viewer, rights: Rights
    ) -> Any:
        executes = asked.get("execute", False)
        if executes and self._settings.read_only:
            raise PageRefusal(403, "READ_ONLY", "this page was started with --read-only")
        if not rights.may_somewhere(Right.OPERATE):
            raise forbidden(Right.OPERATE)
        shows = {"key", "headers", "send_to"} & asked.keys()
        if shows and not rights.may_among(Right.READ, asked.get("topic")):
            raise forbidden(Right.READ, f": {', '.join(sorted(shows))}: it shows content")
        _refuse_without(rights, Right.READ, asked.get("dead_topic"))
        _refuse_without(rights, Right.PRODUCE, asked.get("send_to"))
        within_s = _SETTLED_WITHIN_S if executes else _WITHIN_S
        call = f"dead/{command}"
        what = {"filter_by": sorted(asked), "topic": asked.get("topic", "")[:300]}
        principal = (await self._nodes.who(viewer)).principal
        try:
            answer = await self._run(command, asked, viewer, within_s)
        except PageRefusal as refusal:
            if executes:
                self._acts.note(viewer, call, what, principal, {refusal.reason: 1})
            raise
        if executes:
            outcome = {"DONE": answer["done"], **answer["refused"]}
            self._acts.note(viewer, call, what, principal, outcome)
        return answer

    async def _run(
        self, command: str, asked: Mapping[str, Any], viewer: Viewer, within_s: float
    ) -> Any:
        where = await self._kafka(viewer)
        said = ["dead", command, "--json", *where, *words(asked, places="places")]
        try:
            return await self._runner.run(said, within_s=within_s)
        except PageRefusal as refusal:
            if self._settings.config is None and refusal.reason.startswith("KAFKA_"):
                text = f"{refusal}; the page asks it in plain text, as it was started without"
                raise PageRefusal(refusal.status, refusal.reason, f"{text} --config") from refusal
            raise

    async def _kafka(self, viewer: Viewer) -> list[str]:
        """Returns the options by which a command reaches Kafka."""
        if self._settings.config is not None:
            return [f"--config={self._settings.config}"]
        _, answer = await self._nodes.ask(viewer, _DESCRIBE, pb.DescribeClusterRequest())
        assert isinstance(answer, pb.DescribeClusterResponse)
        if not answer.kafka:
            text = f"{answer.node} does not say which Kafka: start the page with --config FILE"
            raise PageRefusal(503, "KAFKA_UNKNOWN", text)
        return [f"--kafka={answer.kafka}", f"--cluster={answer.cluster_id}"]


def _refuse_without(rights: Rights, right: Right, topic: str | None) -> None:
    if topic is not None and not rights.may(right, topic):
        raise forbidden(right, f" in {topic}" if topic else " in all topics")
