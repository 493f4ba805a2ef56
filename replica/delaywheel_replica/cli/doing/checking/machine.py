"""What this machine offers a node: disk, descriptors, clock, and free ports.

All of it is tried, as the node would: a file is written and synced, a port is listened at.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Final

from delaywheel.storage.folder.disk import PosixDisk
from delaywheel_replica.cli.doing.checking.items import CheckedItem, fault, ok, warning
from delaywheel_replica.config import Config
from delaywheel_replica.peers.sockets import listen, why_not
from delaywheel_replica.process.descriptors import WANTED_DESCRIPTORS, raise_descriptor_limit
from delaywheel_replica.server.intake.descriptors import share_out

_SYNCS: Final = 20
_SYNC_BYTES: Final = 4_096
_SLOW_SYNC_MS: Final = 20.0
"""With `flush = "group"` each group of requests waits so long, and for several files."""

_ROOM: Final = 3
"""The disk should have this many times its reserve when a node starts; the alert has the same."""

_FEW_INODES: Final = 10_000
_FEW_DESCRIPTORS: Final = 16_384

_TIME_ERROR: Final = 5
_UNSYNCHRONISED: Final = 0x40


def machine_items(config: Config) -> Iterator[CheckedItem]:
    """Checks what the node needs of this machine."""
    yield from _disk(config)
    yield _descriptors(config)
    yield _clock()
    yield from _ports(config)


def existing_folder(folder: Path) -> Path:
    """Returns the folder, or what of its path exists."""
    while True:
        try:
            folder.stat()
        except FileNotFoundError:
            folder = folder.parent
        else:
            return folder


def running_pid(data_dir: Path) -> int | None:
    """Returns the process of the node that runs on this folder; None if none does."""
    try:
        pid = int(json.loads((data_dir / "node.run").read_text(encoding="utf-8"))["pid"])
        os.kill(pid, 0)
    except (OSError, ValueError, KeyError):
        return None
    return pid


def _disk(config: Config) -> Iterator[CheckedItem]:
    folder = existing_folder(config.data_dir)
    disk = PosixDisk()
    free, reserve = disk.free_bytes(folder), config.disk_reserve_bytes
    text = f"{_gib(free)} free on {folder}, {_gib(reserve)} of them reserved (disk_reserve_bytes)"
    if free <= reserve:
        yield fault(
            "disk", text, "free space, or choose another data_dir: messages would be refused"
        )
    elif free < _ROOM * reserve:
        yield warning("disk", text, "give it more room: it is full as soon as the reserve is left")
    else:
        yield ok("disk", text)
    inodes = disk.free_inodes(folder)
    if inodes is not None and inodes < _FEW_INODES:
        yield warning(
            "inodes", f"{inodes:,} free on {folder}", "each second with messages takes one"
        )
    try:
        sync_ms = _sync_ms(folder)
    except OSError as error:
        advice = "let the node's user write there, or choose another data_dir"
        yield fault("sync", f"{folder}: {error.strerror}", advice)
        return
    text = f"4 KiB are on the medium after {sync_ms:.1f} ms (median of {_SYNCS})"
    if config.flush == "group" and sync_ms > _SLOW_SYNC_MS:
        advice = 'each acknowledgement waits for several: a faster disk, or flush = "async"'
        yield warning("sync", text, advice)
    else:
        yield ok("sync", f'{text}; flush = "{config.flush}"')


def _sync_ms(folder: Path) -> float:
    times = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(_SYNCS):
            file.write(bytes(_SYNC_BYTES))
            file.flush()
            begin = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append((time.perf_counter() - begin) * 1000)
    return median(times)


def _descriptors(config: Config) -> CheckedItem:
    limit = raise_descriptor_limit()
    shares = share_out(limit, open_files=config.open_files)
    text = (
        f"{limit:,}: {shares.connections:,} callers' connections, {shares.slot_files:,} slot files"
    )
    if limit < _FEW_DESCRIPTORS:
        advice = f"raise the hard limit (LimitNOFILE={WANTED_DESCRIPTORS} in systemd's unit)"
        return warning("descriptors", text, advice)
    return ok("descriptors", text)


def _clock() -> CheckedItem:
    """Asks the kernel whether something keeps its clock."""
    # struct timex begins with modes, offset, freq, maxerror, esterror (microseconds), status.
    timex = (ctypes.c_long * 64)()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    if state < 0:
        text = f"the kernel does not say ({os.strerror(ctypes.get_errno())})"
        return warning("clock", text, "see that NTP or the like keeps it")
    status = timex[5] & 0xFFFFFFFF
    if state == _TIME_ERROR or status & _UNSYNCHRONISED:
        advice = "run chrony, systemd-timesyncd or the like; in a container: on its machine"
        return warning("clock", "the kernel says that nothing keeps it", advice)
    return ok("clock", f"synchronised, wrong by {timex[3] / 1000:.1f} ms at most")


def _ports(config: Config) -> Iterator[CheckedItem]:
    """Tries to listen where the node would, unless it runs already: then it listens there."""
    pid = running_pid(config.data_dir)
    if pid is not None:
        yield ok("ports", f"not tried, as the node runs: process {pid}")
        return
    names = ("listen", "metrics_listen", "web_listen")
    wanted = {name: getattr(config, name) for name in names}
    if len(config.members) > 1:
        wanted["peer_listen"] = config.listens_for_peers
    for name, address in wanted.items():
        if address is not None:
            yield _port(name, address)


def _port(name: str, address: str) -> CheckedItem:
    try:
        listen(address).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            advice = f"stop what listens there, or choose another {name}"
        elif error.errno == errno.EADDRNOTAVAIL:
            advice = f"set {name} to an address of this machine, or to 0.0.0.0:PORT"
        else:
            advice = f"correct {name}"
        return fault(name, f"{address}: {why_not(error)}", advice)
    return ok(name, f"{address} is free")


def _gib(length_bytes: int) -> str:
    return f"{length_bytes / (1 << 30):,.2f} GiB"
