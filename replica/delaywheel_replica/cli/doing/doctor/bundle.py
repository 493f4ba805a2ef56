"""What is sent to who helps: no key, value or header of a message, no token, password or key.

The data folder is listed, never read; of the environment nothing is told. Every text passes
through the `Redactor`.
"""

from __future__ import annotations

import io
import json
import os
import platform
import stat
import sys
import tarfile
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

from confluent_kafka import KafkaException

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cleaner.kafka.control_topic import ControlReader
from delaywheel_replica.cleaner.outside.ports import ControlNotReadInTime, ControlUnreadable
from delaywheel_replica.cli.doing.checking.items import CheckedItem, CheckLevel
from delaywheel_replica.cli.doing.doctor.redacting import Redactor
from delaywheel_replica.cli.failures import CommandFailure
from delaywheel_replica.cli.printing import shapes
from delaywheel_replica.cli.printing.tables import print_table
from delaywheel_replica.cli.printing.text import say
from delaywheel_replica.config import Config
from delaywheel_replica.quantities import counted, size

_MOST_CHARACTERS: Final = 4_000_000
"""Of each file: of a longer one the beginning, of a log the end."""

_LOG_LINES: Final = 5_000
_FEW_FILES: Final = 50
_KAFKA_S: Final = 10.0


def contents(
    config: Config,
    items: Sequence[CheckedItem],
    answer: pb.DescribeClusterResponse | None,
    metrics: Iterable[str],
    log: Path | None,
) -> dict[str, str]:
    """Returns the text of each file by its name, without secrets."""
    redactor = Redactor(config)
    documents: dict[str, Any] = {
        "report.json": [asdict(item) for item in items],
        "settings.json": config.shown(),
        "versions.json": _versions(),
    }
    if answer is not None:
        documents["status.json"] = shapes.cluster(answer)
    if all(item.level is not CheckLevel.AWAY for item in items):
        documents["control.json"] = _control(config)
    texts = {
        name: json.dumps(redactor.document(document), indent=1, ensure_ascii=False)
        for name, document in documents.items()
    }
    texts["folder.txt"] = redactor.text(_listing(config.data_dir))
    for number, text in enumerate(filter(None, metrics), 1):
        texts[f"metrics-{number}.txt"] = redactor.text(text)
    if log is not None:
        with log.open(encoding="utf-8", errors="replace") as lines:
            end = redactor.log("".join(deque(lines, _LOG_LINES)))
        texts["log.txt"] = end[-_MOST_CHARACTERS:]
    # A damaged folder has names that are no text.
    cut = {name: text[:_MOST_CHARACTERS].encode(errors="replace") for name, text in texts.items()}
    return {name: text.decode() for name, text in cut.items()}


def write(bundle: Path, files: Mapping[str, str]) -> None:
    """Says what will be in it, and writes it, for its owner alone."""
    say(f"\n{bundle}:")
    print_table(("file", "bytes"), [(name, len(text.encode())) for name, text in files.items()])
    try:
        # Beside it, so that it is there whole or not at all; links overwrite nothing.
        with tempfile.NamedTemporaryFile(dir=bundle.parent) as whole:
            with tarfile.open(fileobj=whole, mode="w:gz") as archive:
                for name, text in files.items():
                    entry = tarfile.TarInfo(f"{bundle.name.partition('.')[0]}/{name}")
                    content = text.encode()
                    entry.size, entry.mode = len(content), 0o600
                    archive.addfile(entry, io.BytesIO(content))
            whole.flush()
            os.link(whole.name, bundle)
    except OSError as error:
        raise CommandFailure("NOT_WRITTEN", f"{bundle}: {error.strerror or error}") from error


def _versions() -> dict[str, Any]:
    packages = sorted(distributions(), key=lambda each: str(each.name).lower())
    return {
        "python": sys.version,
        "system": platform.platform(),
        "packages": {each.name: each.version for each in packages},
    }


def _control(config: Config) -> list[Any]:
    """Returns the newest record of each key, and what kept us from reading them."""
    reader = ControlReader(config.kafka_settings)
    try:
        records = {record.key: record for record in reader.read_to_end(_KAFKA_S)}
    except (ControlUnreadable, ControlNotReadInTime, KafkaException) as error:
        return [str(error)]
    finally:
        reader.close()
    return [
        {
            "offset": record.offset,
            "name": record.key.decode(errors="replace"),
            "content": None if record.value is None else record.value.decode(errors="replace"),
        }
        for record in records.values()
    ]


def _listing(folder: Path) -> str:
    """Returns each folder with the number of its files and their bytes; names, where few."""
    lines, folders, sizes = [], [], {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # deleted meanwhile
                    continue
                if stat.S_ISDIR(found.st_mode):
                    folders.append(folder / entry.name)
                else:
                    sizes[entry.name] = found.st_size
    except OSError as error:
        lines.append(f"{folder}: {error.strerror}\n")
    lines.append(f"{folder}: {counted(len(sizes), 'file')}, {size(sum(sizes.values()))}\n")
    if len(sizes) <= _FEW_FILES:
        lines += [f"{folder}/{name} {length}\n" for name, length in sorted(sizes.items())]
    return "".join([*lines, *map(_listing, sorted(folders))])
