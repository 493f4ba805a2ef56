"""Runs the command line's own commands for viewers: what they do is written once.

Each is a process: what Kafka's client and the index's search take of memory goes with it, and a
defect of theirs ends nothing else. Its words come on its standard input, its token in a file that
has no name, so that other users of the machine see neither.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from delaywheel_replica.web.refusals import PageRefusal

AT_ONCE: Final = 4
OUTPUT_AT_MOST: Final = 16 << 20
_STATUSES: Final = {1: 404, 2: 400, 3: 503, 4: 504}
"""By exit code, docs/CLI.md: refused, wrong usage, not now, not known whether it was done."""


class CommandRunner:
    """Runs commands. For the event loop's thread."""

    def __init__(self) -> None:
        self._running = 0

    async def run(self, words: Sequence[str], *, within_s: float, token: str | None = None) -> Any:
        """Returns the JSON that a command prints; ends it if it takes longer than `within_s`.

        It shows the token to nodes. Refuses if it prints none, or if there are too many.
        """
        if self._running >= AT_ONCE:
            raise PageRefusal(
                503, "COMMANDS_FULL", f"{AT_ONCE} run already: try again", retry_after_s=2.0
            )
        self._running += 1
        try:
            with _files_of(token) as files:
                # Behind `--` it would be one of the words that are no options.
                at = words.index("--") if "--" in words else len(words)
                shown = [f"--token-file=/dev/fd/{file}" for file in files]
                return await _answer([*words[:at], *shown, *words[at:]], within_s, files)
        finally:
            self._running -= 1


async def _answer(words: Sequence[str], within_s: float, files: Sequence[int]) -> Any:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "delaywheel_replica.cli.told"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=files,
        env={**os.environ, "PYTHONUTF8": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(within_s):
            process.stdin.write(json.dumps(words).encode())
            process.stdin.close()
            printed, said = await asyncio.gather(_read(process.stdout), _read(process.stderr))
            code = await process.wait()
    except TimeoutError as error:
        raise PageRefusal(
            504, "COMMAND_TOO_SLOW", f"it took longer than {within_s:g} s: ask for less"
        ) from error
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    try:
        return json.loads(printed)
    except ValueError as error:
        raise _refusal(code, said.decode(errors="replace")) from error


async def _read(stream: asyncio.StreamReader) -> bytes:
    parts = bytearray()
    while part := await stream.read(1 << 18):
        parts += part
        if len(parts) > OUTPUT_AT_MOST:
            raise PageRefusal(
                507, "ANSWER_TOO_LARGE", f"the answer has more than {OUTPUT_AT_MOST:,} bytes"
            )
    return bytes(parts)


def _refusal(code: int, said: str) -> PageRefusal:
    """Returns why a command printed no JSON: its last line says so, `error: REASON: text`."""
    last = said.strip().rpartition("\n")[2]
    reason, _, text = last.removeprefix("error: ").partition(": ")
    return PageRefusal(_STATUSES.get(code, 500), reason[:100] or "COMMAND_FAILED", text[:1000])


@contextmanager
def _files_of(token: str | None) -> Iterator[tuple[int, ...]]:
    if token is None:
        yield ()
        return
    file = os.memfd_create("token")
    try:
        os.fchmod(file, 0o600)
        os.write(file, token.encode())
        yield (file,)
    finally:
        os.close(file)
