"""Where each file lies in a data folder: docs/FORMAT.md shows the whole of it."""

import re
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from delaywheel.identity import WheelId

SECONDS_PER_HOUR = 3600

_SLOT_FILE = re.compile(r"(\d+)\.slot")
_INDEX_FILE = re.compile(r"index\.(\d+)")


def dial_path(data: Path) -> Path:
    """Returns the path of the dial."""
    return data / "dial"


def wheels_folder(data: Path) -> Path:
    """Returns the folder of all wheels."""
    return data / "wheels"


@lru_cache(maxsize=1024)
def wheel_folder(data: Path, wheel: WheelId) -> Path:
    """Returns the folder of one wheel."""
    return data / "wheels" / str(wheel)


@lru_cache(maxsize=1024)
def meta_path(folder: Path) -> Path:
    """Returns the path of a wheel's meta.json, without which a folder holds no wheel."""
    return folder / "meta.json"


@lru_cache(maxsize=1024)
def checkpoint_path(folder: Path) -> Path:
    """Returns the path of a wheel's checkpoint."""
    return folder / "checkpoint"


@lru_cache(maxsize=1024)
def index_path(folder: Path, segment: int) -> Path:
    """Returns the path of one segment of a wheel's index."""
    return folder / f"index.{segment}"


def index_segment(name: str) -> int | None:
    """Returns the number of a segment from its file's name; None for other files."""
    match = _INDEX_FILE.fullmatch(name)
    return int(match[1]) if match else None


@lru_cache(maxsize=1024)
def writing_path(folder: Path) -> Path:
    """Returns the path of the file that names the slots of the last group."""
    return folder / "writing"


@lru_cache(maxsize=1024)
def moving_path(folder: Path) -> Path:
    """Returns the path of the file that is to replace one of the wheel that the medium refuses.

    One name for all of them: if the process dies meanwhile, what is left is written over or deleted
    at the next start, whatever becomes of the file that it was to replace.
    """
    return folder / "moving"


@lru_cache(maxsize=1024)
def table_folder(folder: Path) -> Path:
    """Returns the folder of a wheel's slot table."""
    return folder / "table"


@lru_cache(maxsize=1024)
def table_head_path(folder: Path) -> Path:
    """Returns the path of the slot table's head."""
    return folder / "table" / "head"


@lru_cache(maxsize=4096)
def table_path(folder: Path, hour: int) -> Path:
    """Returns the path of the slot table's part for an hour since 1970."""
    return folder.joinpath("table", hour_name(hour))


@lru_cache(maxsize=1024)
def slots_folder(folder: Path) -> Path:
    """Returns the folder of a wheel's slot files."""
    return folder / "slots"


@lru_cache(maxsize=1024)
def hour_folder(folder: Path, hour: int) -> Path:
    """Returns the folder of a wheel's slot files of an hour since 1970."""
    return folder.joinpath("slots", hour_name(hour))


@lru_cache(maxsize=4096)
def slot_name(slot: int) -> str:
    """Returns the name of a slot's file, within the folder of its hour."""
    return f"{slot}.slot"


@lru_cache(maxsize=1024)
def slot_path(folder: Path, slot: int) -> Path:
    """Returns the path of a wheel's file of one slot."""
    return hour_folder(folder, slot // SECONDS_PER_HOUR) / slot_name(slot)


def slot_of_name(name: str) -> int | None:
    """Returns the slot from its file's name; None for other files."""
    match = _SLOT_FILE.fullmatch(name)
    return int(match[1]) if match else None


@lru_cache(maxsize=4096)
def hour_name(hour: int) -> str:
    """Returns the name of the folder of an hour since 1970."""
    return datetime.fromtimestamp(hour * SECONDS_PER_HOUR, UTC).strftime("%Y%m%dT%H")


@lru_cache(maxsize=4096)
def hour_of_name(name: str) -> int | None:
    """Returns the hour since 1970 from its folder's name; None for other folders."""
    try:
        moment = datetime.strptime(name, "%Y%m%dT%H").replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(moment.timestamp()) // SECONDS_PER_HOUR
