"""`POST /api/v1/trace`: the command `delaywheel trace`, with its JSON.

It asks nodes with the viewer's token. The index lies beside the page, so what it has is judged
here: a step needs `inspect` in its topic, keys and tags `read`, also to look for them.
"""

from __future__ import annotations

from typing import Any, Final

from aiohttp import web

from delaywheel_replica.rights import Right, Rights
from delaywheel_replica.web.calls import body_of
from delaywheel_replica.web.commands.running import CommandRunner
from delaywheel_replica.web.commands.words import Fields, parsed, words
from delaywheel_replica.web.guard import viewer_of
from delaywheel_replica.web.nodes import NodeCalls
from delaywheel_replica.web.refusals import forbidden
from delaywheel_replica.web.settings import PageSettings

_WITHIN_S: Final = 60.0
FIELDS: Final[Fields] = {
    **dict.fromkeys(("key", "tag", "status", "group", "topic", "from", "to"), str),
    "target": str,
    "limit": int,
}
_CONTENT: Final = ("key", "tags")
_TOLD_CONTENT: Final = ("why", "extra")
"""What a consumer tells: its error's text, as in the headers of a dead letter, quotes content."""


class TraceRoutes:
    """Answers where messages are, and were."""

    def __init__(self, settings: PageSettings, nodes: NodeCalls, runner: CommandRunner) -> None:
        self._settings: Final = settings
        self._nodes: Final = nodes
        self._runner: Final = runner

    async def trace(self, request: web.Request) -> web.Response:
        """Searches."""
        viewer = viewer_of(request)
        rights = await self._nodes.rights(viewer)
        if not rights.may_somewhere(Right.INSPECT):
            raise forbidden(Right.INSPECT)
        asked = parsed(await body_of(request), FIELDS)
        if {"key", "tag"} & asked.keys() and not rights.may_among(Right.READ, asked.get("topic")):
            raise forbidden(Right.READ, ": keys and tags are content")
        target = [asked.pop("target")] if "target" in asked else []
        options = words({**asked, "targets": target}, places="targets")
        token = None if self._settings.nodes_tls is None else viewer.token
        found = await self._runner.run(
            ["trace", "--json", *self._nodes_asked(), *options], within_s=_WITHIN_S, token=token
        )
        return web.json_response(_shown(found, rights))

    def _nodes_asked(self) -> list[str]:
        said = [f"--server={','.join(self._settings.nodes)}"]
        said += [f"--index={index}" for index in self._settings.indexes]
        tls = self._settings.nodes_tls
        if tls is None:
            return said
        files = (("ca", tls.ca), ("cert", tls.cert), ("key", tls.key))
        return [*said, "--tls", *(f"--tls-{name}={file}" for name, file in files if file)]


def _shown(found: dict[str, Any], rights: Rights) -> dict[str, Any]:
    """Leaves out what a viewer may not see, and says so."""
    withheld = 0
    for way in found["ways"]:
        own = way["topic"] or ""
        seen = [s for s in way["steps"] if rights.may(Right.INSPECT, s.get("topic") or own)]
        withheld += len(way["steps"]) - len(seen)
        way["steps"] = seen
        for part in (way, *seen):
            if not rights.may(Right.READ, part.get("topic") or own):
                told = _TOLD_CONTENT if part.get("kind") == "processed" else ()
                part.update({name: None for name in (*_CONTENT, *told) if name in part})
        if not rights.may_everywhere(Right.INSPECT):
            _leave_out_others(way, rights)
    if withheld:
        found["ways"] = [way for way in found["ways"] if way["steps"]]
        text = f"steps in topics without the right 'inspect': {withheld}"
        found["missing"].append({"part": "ways", "reason": "FORBIDDEN", "message": text})
    return found


def _leave_out_others(way: dict[str, Any], rights: Rights) -> None:
    """Leaves out ids, places and topic of messages of which a way shows no step."""
    ids = dict.fromkeys(step["id"] for step in way["steps"] if step.get("id"))
    way["ids"] = [*ids]
    if not rights.may(Right.INSPECT, way["topic"] or ""):
        way["topic"] = None
    for part in (way, *way["steps"]):
        for name in ("root", "next_id"):
            named = part.get(name) or ""
            topic, _, is_place = named.partition("/")
            if named not in ids and not (is_place and rights.may(Right.INSPECT, topic)):
                part.update({name: None} if name in part else {})
