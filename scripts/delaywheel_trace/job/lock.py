"""One job an index: a lock that says who has it.

On a disk the kernel has it, which releases it when the process ends. Elsewhere the file itself is
it: whoever holds it writes every ten seconds that he does, and one that says nothing for a minute
has lost it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, NoReturn

from delaywheel_audit.session import CouldNotRun
from delaywheel_trace.index.folder import UNREACHED, IndexFolder

_NAME: Final = "lock"
_TOLD_EACH_S: Final = 10.0
_LOST_AFTER_MS: Final = 60_000


@contextmanager
def only_job(folder: IndexFolder) -> Iterator[None]:
    """Holds the index's lock.

    Raises:
        CouldNotRun: INDEX_TAKEN, which names who has it; INDEX_UNWRITABLE.
    """
    try:
        folder.filesystem.create_dir(folder.root, recursive=True)
        held = _on_disk(folder) if folder.is_local else _elsewhere(folder)
        with held:
            yield
    except UNREACHED as error:
        raise CouldNotRun("INDEX_UNWRITABLE", f"{folder.uri}: {error}") from error


def _ours(since: float) -> bytes:
    said = {"host": socket.gethostname(), "pid": os.getpid(), "since": _time(since)}
    return json.dumps({**said, "told_ms": int(time.time() * 1000)}).encode()


def _time(unix_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))


def _taken(folder: IndexFolder, content: bytes) -> NoReturn:
    try:
        said = json.loads(content)
        who = f"process {said['pid']} on {said['host']}, since {said['since']}"
    except (ValueError, KeyError, TypeError):
        who = "another job"
    raise CouldNotRun("INDEX_TAKEN", f"{folder.uri}: {who}; one job keeps an index")


@contextmanager
def _on_disk(folder: IndexFolder) -> Iterator[None]:
    descriptor = os.open(folder.full(_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _taken(folder, os.pread(descriptor, 1_000, 0))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _ours(time.time()), 0)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _elsewhere(folder: IndexFolder) -> Iterator[None]:
    path, since = folder.full(_NAME), time.time()
    try:
        with folder.filesystem.open_input_stream(path) as stream:
            content: bytes = stream.read()
        if time.time() * 1000 - json.loads(content)["told_ms"] < _LOST_AFTER_MS:
            _taken(folder, content)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass  # nobody has it
    ended = threading.Event()

    def tell() -> None:
        with folder.filesystem.open_output_stream(path) as stream:
            stream.write(_ours(since))

    def keep_telling() -> None:
        while not ended.wait(_TOLD_EACH_S):
            with suppress(*UNREACHED):  # whatever is written there next says so
                tell()

    tell()
    thread = threading.Thread(target=keep_telling, name="lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        folder.delete(_NAME)
