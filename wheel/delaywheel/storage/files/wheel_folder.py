"""The folder of one wheel: its identity, and how much is on the medium; making and deleting it.

A folder holds a wheel from the moment its meta.json exists until that is deleted: a folder without
one was being made or deleted when a crash came (``delete_halves``).
"""

import errno
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from delaywheel.identity import NameInvalidError, WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.slot_files import delete_slots_below, list_slots
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk, is_medium_error
from delaywheel.storage.folder.steps import Steps, finish
from delaywheel.storage.frames.format import NO_SLOT

_META_VERSION = 1


class WheelState(StrEnum):
    """The folder's knowledge of which objects may still write to a wheel."""

    OPEN = "open"
    CLOSED = "closed"


class WheelExists(Exception):
    """A wheel of this name was opened before; its numbers must not be reused."""


class WheelMissing(Exception):
    """There is no wheel of this name in the folder."""


class MetaDamaged(Exception):
    """A wheel's meta.json cannot be understood."""


class MetaTooNew(Exception):
    """A wheel's meta.json was written by a release that this program does not know."""


@dataclass(frozen=True, slots=True)
class WheelMeta:
    """The content of meta.json.

    ``boot`` is the machine's boot id when the wheel was made, or recovered after a crash of the
    machine: under any other id, earlier writes may be lost.
    """

    wheel: WheelId
    members: Mapping[str, str]  # node -> storage uuid, as registered
    min_insync: int
    span_seconds: int
    state: WheelState = WheelState.OPEN
    final_seq: int | None = None  # the committed T, once closed
    boot: str = ""


class Checkpoint(NamedTuple):
    """Everything up to ``seq`` is on the medium, except the missing frames."""

    seq: int
    missing: SeqSet = NO_SEQS
    first_segment: int | None = 0
    """Index segments below this one may have been deleted; None: an earlier release noted none."""


def list_wheels(disk: Disk, data: Path) -> list[WheelId]:
    """Returns the wheels of a data folder, in order; a folder without meta.json does not count."""
    folder = layout.wheels_folder(data)
    return sorted(
        WheelId.parse(name)
        for name in disk.list_folder(folder)
        if _is_wheel_name(name) and disk.exists(layout.meta_path(folder / name))
    )


def make_wheel(disk: Disk, data: Path, meta: WheelMeta) -> None:
    """Makes the folder of a wheel without steps; see `making_wheel`."""
    finish(making_wheel(disk, data, meta))


def making_wheel(disk: Disk, data: Path, meta: WheelMeta) -> Steps[None]:
    """Makes the folder of a wheel, which is on the medium at the end; raises WheelExists."""
    folder = layout.wheel_folder(data, meta.wheel)
    if disk.exists(layout.meta_path(folder)):
        raise WheelExists(f"wheel {meta.wheel} was opened before")
    disk.make_folder(layout.slots_folder(folder))
    save_meta(disk, data, meta)
    yield
    yield from syncing_names(disk, data)


def syncing_names(disk: Disk, data: Path) -> Steps[None]:
    """Puts the names of all wheels on the medium."""
    disk.sync_folder(layout.wheels_folder(data))
    yield
    disk.sync_folder(data)
    yield


def load_meta(disk: Disk, data: Path, wheel: WheelId) -> WheelMeta:
    """Reads a wheel's identity.

    Raises:
        WheelMissing: There is no such wheel.
        MetaDamaged: Its meta.json cannot be understood.
        MetaTooNew: It has a version that this program does not know.
    """
    path = layout.meta_path(layout.wheel_folder(data, wheel))
    try:
        content = disk.read_file(path)
    except FileNotFoundError as error:
        raise WheelMissing(f"{data} has no wheel {wheel}") from error
    try:
        document = json.loads(content)
        return _meta_of(wheel, document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MetaDamaged(f"{path}: {error}") from error


def save_meta(disk: Disk, data: Path, meta: WheelMeta) -> None:
    """Saves a wheel's identity durably."""
    document: dict[str, Any] = {
        "version": _META_VERSION,
        "wheel": str(meta.wheel),
        "members": dict(meta.members),
        "min_insync": meta.min_insync,
        "span_seconds": meta.span_seconds,
        "state": meta.state.value,
        "final_seq": meta.final_seq,
    }
    if meta.boot:
        document["boot"] = meta.boot
    content = json.dumps(document, indent=2, sort_keys=True) + "\n"
    disk.replace_file(layout.meta_path(layout.wheel_folder(data, meta.wheel)), content.encode())


def deleting_wheel(disk: Disk, data: Path, wheel: WheelId, undeletable: Undeletable) -> Steps[None]:
    """Deletes an unregistered wheel, including slot files that were not swept yet.

    Slot files are deleted first, and durably: beside a missing meta.json nothing would ever delete
    them. Then meta.json, so that no half wheel is left. Raises OSError if something of it cannot be
    deleted; all other slot files are.
    """
    folder = layout.wheel_folder(data, wheel)
    for _ in delete_slots_below(disk, folder, NO_SLOT, undeletable):
        yield
    slots = layout.slots_folder(folder)
    left = [path for path in undeletable.paths if path.is_relative_to(slots)]
    if left:
        raise OSError(errno.EBUSY, "it cannot be deleted yet", str(left[0]))
    disk.delete_folder(slots)
    if disk.exists(folder):
        disk.sync_folder(folder)
    yield
    disk.delete(layout.meta_path(folder))
    yield
    for inside in (layout.table_folder(folder), folder):
        for name, _ in disk.list_sizes(inside):
            disk.delete(inside / name)
            yield
    disk.delete_folder(folder)
    disk.sync_folder(layout.wheels_folder(data))


def delete_halves(disk: Disk, data: Path) -> list[WheelId]:
    """Deletes wheels that a crash left half made or half deleted; returns their names.

    They have no meta.json, and no slot files yet or no longer. If slot files lie beside a missing
    meta.json, the cause is different, and nothing is touched.
    """
    halves = []
    for name in disk.list_folder(layout.wheels_folder(data)):
        folder = layout.wheels_folder(data) / name
        if not _is_wheel_name(name) or disk.exists(layout.meta_path(folder)):
            continue
        if next(list_slots(disk, folder), None) is None:
            with suppress(OSError):  # it harms nobody, and the next start tries again
                disk.delete_folder(folder)
                halves.append(WheelId.parse(name))
    return halves


def save_checkpoint(disk: Disk, folder: Path, checkpoint: Checkpoint) -> None:
    """Records what is on the medium."""
    document: dict[str, Any] = {"seq": checkpoint.seq}
    if checkpoint.missing:
        document["lacking"] = checkpoint.missing.to_json()
    if checkpoint.first_segment is not None:
        document["first_segment"] = checkpoint.first_segment
    disk.replace_file(layout.checkpoint_path(folder), json.dumps(document).encode())


def load_checkpoint(disk: Disk, folder: Path) -> Checkpoint | None:
    """Returns what is recorded; an empty checkpoint if nothing is, None if it is damaged."""
    try:
        content = disk.read_file(layout.checkpoint_path(folder))
    except FileNotFoundError:
        return Checkpoint(0)
    except OSError as error:
        if not is_medium_error(error):
            raise
        return None
    try:
        document = json.loads(content)
        missing = SeqSet.from_json(document.get("lacking", ()))
        first = document.get("first_segment")  # earlier releases did not record it
        return Checkpoint(int(document["seq"]), missing, None if first is None else int(first))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def _is_wheel_name(name: str) -> bool:
    try:
        WheelId.parse(name)
    except NameInvalidError:
        return False
    return True


def _meta_of(wheel: WheelId, document: dict[str, Any]) -> WheelMeta:
    if int(document["version"]) > _META_VERSION:
        known = f"this program knows those up to {_META_VERSION}"
        raise MetaTooNew(f"meta.json of {wheel} has version {document['version']}, {known}")
    if document["wheel"] != str(wheel):
        raise ValueError(f"it is the meta.json of wheel {document['wheel']}")
    final_seq = document["final_seq"]
    return WheelMeta(
        wheel=wheel,
        members={str(node): str(storage) for node, storage in document["members"].items()},
        min_insync=int(document["min_insync"]),
        span_seconds=int(document["span_seconds"]),
        state=WheelState(document["state"]),
        final_seq=None if final_seq is None else int(final_seq),
        boot=str(document.get("boot", "")),
    )
