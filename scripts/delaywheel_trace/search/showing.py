"""Shows ways: as lines and tables for people, and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from delaywheel_replica.cli.printing.tables import print_json, print_ndjson, print_table
from delaywheel_replica.cli.printing.text import note, say
from delaywheel_replica.quantities import about, counted, iso
from delaywheel_trace.search.answering import NODES, PLAUSIBLE_MS, Answer
from delaywheel_trace.search.indexes import SearchedIndex
from delaywheel_trace.search.ways import FORWARDED, NOW, ClockDifference, Event, Step, Way

_KEY_CHARACTERS: Final = 40
"""Of a key in a table, in which all rows are as wide as the widest: a hashed one is whole."""
_COLUMNS: Final = ("began", "root", "topic", "key", "steps", "last", "status", "at")


def show(found: Answer, *, as_json: bool, as_ndjson: bool) -> None:
    """Prints what is known, and how much was looked at."""
    if as_json:
        print_json(_shape(found))
        return
    if as_ndjson:
        print_ndjson(_way_shape(way) for way in found.ways)
    elif not found.ways:
        say(found.nothing)
    elif found.question.target is None:
        print_table(_COLUMNS, [_cells(way) for way in found.ways])
    else:
        for way in found.ways:
            _print_way(way)
    for line in map(_one_line, _lines(found)):
        note(line) if as_ndjson else say(line)


def _one_line(text: str) -> str:
    """Returns a line that stays one: a tag or reason with line feeds would forge steps."""
    return text.replace("\n", r"\n")


def _lines(found: Answer) -> Iterator[str]:
    """Yields what every answer says."""
    indexes = found.searched.indexes
    for index in indexes:
        yield _searched(index, is_one=len(indexes) == 1)
    if found.question.is_default:
        yield "of the last hour: --from and --to say another time"
    if found.searched.more:
        yield f"there is more than is shown: --limit (now {found.question.limit:,}), or a range"
    if found.ways:
        yield _clocks([way.clocks for way in found.ways if way.clocks is not None])
    for one in found.missing:
        what = "the nodes" if one.part == NODES else one.part
        yield f"not shown: {what}: {one.reason}: {one.message}"


def _shape(found: Answer) -> dict[str, Any]:
    return {
        "known": bool(found.ways),
        "nothing": None if found.ways else found.nothing,
        "ways": [_way_shape(way) for way in found.ways],
        "more": found.searched.more,
        "searched": [_index_shape(index) for index in found.searched.indexes],
        "missing": [
            {"part": one.part, "reason": one.reason, "message": one.message}
            for one in found.missing
        ],
    }


def _print_way(way: Way) -> None:
    """Prints a way, one step a line."""
    facts = [("id" if "/" not in way.root else "place", way.root), ("topic", way.first("topic"))]
    key = way.first("key")
    facts += [("key", key and _key_shown(key)), ("tags", way.first("tags"))]
    say(_one_line("  ".join(f"{name} {value}" for name, value in facts if value is not None)))
    width = max(len(step.kind) for step in way.steps)
    day = ""
    for step in way.steps:
        begun, time = _clock(step)
        if begun and begun != day:
            say(begun)
            day = begun
        say(_one_line(f"{time:13}  {step.kind:{width}}  {'; '.join(_parts(way, step))}"))


def _way_shape(way: Way) -> dict[str, Any]:
    """Returns a way as JSON."""
    return {
        "root": way.root,
        "ids": way.ids,
        "topic": way.first("topic"),
        "key": way.first("key"),
        "tags": way.first("tags"),
        "clocks_differ": None if way.clocks is None else way.clocks._asdict(),
        "steps": [_step_shape(step) for step in way.steps],
    }


def _index_shape(index: SearchedIndex) -> dict[str, Any]:
    """Returns what was searched of an index as JSON."""
    return {
        "index": index.uri,
        "from": _iso(index.from_ms),
        "to": _iso(index.to_ms),
        "files": index.files,
        "newest": _iso(index.newest_ms),
        "ledger_to": _iso(index.ledger_to_ms),
        "gaps": [{"from": _iso(gap.from_ms), "to": _iso(gap.to_ms)} for gap in index.gaps],
        "bad": index.bad,
        "shares": None
        if index.shares is None
        else [{"client": name, "share": share} for name, share in index.shares.items()],
        "dropped": index.dropped,
    }


def _searched(index: SearchedIndex, *, is_one: bool) -> str:
    """Returns how much of an index was searched, in a line."""
    where = "" if is_one else f"{index.uri}: "
    if index.from_ms is None or index.to_ms is None:
        return f"searched: {where}no file"
    parts = [
        f"{where}{_hour(index.from_ms)} to {_hour(index.to_ms)}, {counted(index.files, 'file')}"
    ]
    if index.shares is None or index.dropped is None:
        parts.append("which share is traced, and what was dropped, is unknown")
    else:
        parts += _told(index.shares, index.dropped)
    if index.gaps:
        gaps = ", ".join(f"{_iso(gap.from_ms)} to {_iso(gap.to_ms)}" for gap in index.gaps)
        parts.append(f"never read: {gaps}")
    if index.bad:
        parts.append(f"{counted(index.bad, 'record')} unreadable")
    if index.newest_ms is not None:
        parts.append(f"newest event {_iso(index.newest_ms)}")
    return f"searched: {'; '.join(parts)}"


def _told(shares: Mapping[str, float], dropped: int) -> list[str]:
    """Returns which share of ways reporters tell of, and how many events they have dropped."""
    traced = "programs with a trace tell of all messages"
    if shares:
        named = sorted(shares.items(), key=lambda item: (item[1], item[0]))
        traced = ", ".join(f'"{name}" traces {share:.3g} of all ways' for name, share in named)
    return [traced, f"{counted(dropped, 'event')} dropped"]


def _clocks(clocks: Sequence[ClockDifference]) -> str:
    """Returns whether clocks agree."""
    if not clocks:
        return "clocks agree"
    worst = max(clocks)
    return f"clocks differ by at least {about(worst.ms)}: {worst.ahead} is ahead of {worst.behind}"


def _key_shown(text: str) -> str:
    """Returns a key as people read it; docs/TRACE.md says how it is written."""
    match text[:2]:
        case "\\h":
            return f"hashed {text[2:]}"
        case "\\x":
            return f"0x{text[2:]}"
        case "\\c":
            return f"{_key_shown(text[2:])}…"
        case "\\t":
            text = text[2:]
    return json.dumps(text, ensure_ascii=False)


def _parts(way: Way, step: Step) -> Iterator[str]:
    """Yields what is to be said of a step."""
    yield _said(step)
    told = step.told
    if told.get("id") not in (None, way.root):
        yield f"id {told['id']}"
    if told["kind"] not in (FORWARDED, NOW) and told.get("topic") not in (None, way.first("topic")):
        yield f"topic {told['topic']}"
    if told.get("cluster") and told["cluster"] != way.first("cluster"):
        yield f"cluster {told['cluster']}"


def _said(step: Step) -> str:
    told = step.told
    kind = told["kind"]
    if kind in _SAID:
        return _SAID[kind](told)
    return _changed(step) if kind == "changed" else str(told.get("status"))


def _sent(told: Event) -> str:
    tries = told.get("attempts") or 1
    attempts = f", {tries} attempts" if tries > 1 else ""
    return f"{told.get('status')}{_took(told)}{attempts}{_by(told)}"


def _accepted(told: Event) -> str:
    return f"{told.get('reporter')}/{told.get('number')}, due {_iso(told.get('due_ms'))}"


def _outcome(told: Event) -> str:
    said = [told.get("what"), told.get("why")]
    if told.get("to_ms") is not None:
        said.append(f"until {_iso(told['to_ms'])}")
    return ", ".join(str(one) for one in said if one) or f"due {_iso(told.get('due_ms'))}"


def _forwarded(told: Event) -> str:
    late_ms = told.get("late_ms")
    if late_ms is None or late_ms < 0:
        return f"{_place(told)}, due {_iso(told.get('due_ms'))}"
    return f"{about(late_ms)} late, {_place(told)}"


def _now(told: Event) -> str:
    status, to_ms = told.get("status"), told.get("to_ms")
    return f"{status} to {_iso(to_ms)}" if to_ms else f"{status}, due {_iso(told.get('due_ms'))}"


def _changed(step: Step) -> str:
    told = step.told
    what, status = str(told.get("what")), str(told.get("status"))
    said = status.lower().replace("_", " ") if step.level is not None else f"{what}: {status}"
    to = f" to {_iso(told['to_ms'])}" if told.get("to_ms") is not None else ""
    return f"{said}{to}{_took(told)}{_by(told)}"


def _processed(told: Event) -> str:
    said = str(told.get("status")).lower().replace("_", " ")
    took_us = told.get("handler_us")
    if took_us is not None:
        said += f" after {_duration(took_us)}"
    if told.get("why"):
        said += f": {told['why']}"
    if told.get("to_ms") is not None:
        said += f", again {_iso(told['to_ms'])}"
    return f"{said}{_of_group(told)}"


def _of_group(told: Event) -> str:
    attempt = told.get("attempt")
    tried = "" if attempt is None else f", attempt {attempt}"
    return "" if told.get("group") is None else f" (group {told['group']}{tried})"


def _place(told: Event) -> str:
    if told.get("offset") is None:
        return f"to {told.get('topic')}"
    return f"{told.get('topic')}/{told.get('partition')}/{told['offset']}"


def _took(told: Event) -> str:
    return "" if told.get("cost_us") is None else f" in {_duration(told['cost_us'])}"


def _by(told: Event) -> str:
    host, ip, client = told.get("host"), told.get("ip"), told.get("client")
    where = "" if host is None else f" by {host}"
    where += "" if ip is None else f" ({ip})"
    return where if client is None else f"{where}, client {json.dumps(client, ensure_ascii=False)}"


def _duration(us: int) -> str:
    return f"{us} µs" if us < 1_000 else about(us // 1_000)


_SAID: Final = {
    "sent": _sent,
    "accepted": _accepted,
    "outcome": _outcome,
    FORWARDED: _forwarded,
    "processed": _processed,
    NOW: _now,
}


def _cells(way: Way) -> Sequence[object]:
    last = way.steps[-1]
    timed = [step for step in way.steps if step.told.get("time_ms") is not None]
    key = way.first("key")
    key = None if key is None else _key_shown(key)
    if key is not None and len(key) > _KEY_CHARACTERS:
        key = f"{key[: _KEY_CHARACTERS - 1]}…"
    return (
        _iso(timed[0].low_ms) if timed else None,
        way.root,
        way.first("topic"),
        key,
        len(way.steps),
        last.kind,
        last.told.get("status"),
        _iso(last.told.get("time_ms")),
    )


def _step_shape(step: Step) -> dict[str, Any]:
    told = {name: value for name, value in step.told.items() if name != "index"}
    if isinstance(told.get("extra"), str):
        told["extra"] = json.loads(told["extra"])
    begun_ms = None if step.told["kind"] == NOW else step.low_ms
    return {"step": step.kind, "began": _iso(begun_ms), "time": _iso(told.get("time_ms")), **told}


def _clock(step: Step) -> tuple[str, str]:
    """Returns day and time at which a step began; of what nobody timed none."""
    if step.told["kind"] == NOW or step.low_ms is None:
        return "", ""
    day, _, time = (_iso(step.low_ms) or "").partition("T")
    return day, time


def _iso(ms: int | None) -> str | None:
    if ms is None:
        return None
    return iso(ms) if 0 <= ms < PLAUSIBLE_MS else str(ms)


def _hour(ms: int) -> str:
    if not 0 <= ms < PLAUSIBLE_MS:
        return str(ms)
    moment = datetime.fromtimestamp(ms / 1000, UTC)
    is_whole = ms % 3_600_000 == 0
    return f"{moment:%Y-%m-%dT%HZ}" if is_whole else iso(ms)
