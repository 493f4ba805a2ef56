import errno
import os
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.storage.folder import status_file as row
from delaywheel.storage.folder.status_file import (
    HALF_LENGTH_BYTES,
    RowReader,
    RowTooLargeError,
    RowWriter,
    in_memory,
)


def test_nothing_was_written_yet(tmp_path: Path) -> None:
    path = tmp_path / "server.row"
    reader = RowReader(path, dict)
    assert reader.read() is None
    writer = RowWriter(path)
    assert reader.read() is None
    writer.write({"seq": 1})
    assert reader.read() == {"seq": 1}


def test_a_new_writer_goes_on_from_the_last_document(tmp_path: Path) -> None:
    path = tmp_path / "server.row"
    RowWriter(path).write({"pid": 1})
    reader = RowReader(path, dict)
    second = RowWriter(path)
    assert reader.read() == {"pid": 1}
    for number in range(5):
        second.write({"pid": 2, "number": number})
        assert reader.read() == {"pid": 2, "number": number}


def test_a_document_is_decoded_once(tmp_path: Path) -> None:
    path = tmp_path / "row"
    writer = RowWriter(path)
    decoded: list[dict[str, Any]] = []

    def decode(document: dict[str, Any]) -> dict[str, Any]:
        decoded.append(document)
        return document

    reader = RowReader(path, decode)
    writer.write({"number": 1})
    first = reader.read()
    assert reader.read() is first
    writer.write({"number": 1})
    assert reader.read() is not first
    assert len(decoded) == 2


def test_a_document_that_cannot_be_decoded_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "row"
    writer = RowWriter(path)
    reader = RowReader(path, lambda document: document["number"])
    writer.write({"number": 1})
    assert reader.read() == 1
    writer.write({})
    for _ in range(2):
        with pytest.raises(KeyError):
            reader.read()
    writer.write({"number": 2})
    assert reader.read() == 2


def test_what_does_not_fit_goes_into_a_larger_file(tmp_path: Path) -> None:
    path = tmp_path / "row"
    writer, reader = RowWriter(path), RowReader(path, dict)
    for length in (1, HALF_LENGTH_BYTES - 40, HALF_LENGTH_BYTES, 5 * HALF_LENGTH_BYTES, 2):
        document = {"text": "x" * length}
        writer.write(document)
        assert reader.read() == document
        assert RowReader(path, dict).read() == document
    assert [each.name for each in tmp_path.iterdir()] == ["row"]
    # The next life continues with the larger file.
    second = RowWriter(path)
    assert reader.read() == {"text": "xx"}
    second.write({"text": "y" * 6 * HALF_LENGTH_BYTES})
    assert reader.read() == {"text": "y" * 6 * HALF_LENGTH_BYTES}


def test_what_fits_no_row_is_refused_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row, "MAX_HALF_LENGTH_BYTES", 2 * HALF_LENGTH_BYTES)
    writer = RowWriter(tmp_path / "row")
    writer.write({"text": "x" * HALF_LENGTH_BYTES})
    with pytest.raises(RowTooLargeError):
        writer.write({"text": "x" * 2 * HALF_LENGTH_BYTES})
    assert RowReader(tmp_path / "row", dict).read() == {"text": "x" * HALF_LENGTH_BYTES}


def test_a_writer_that_dies_while_it_grows_leaves_the_last_document(tmp_path: Path) -> None:
    path = tmp_path / "row"
    writer = RowWriter(path)
    writer.write({"number": 1})
    (tmp_path / "row.new").write_bytes(b"half of a larger one")
    again = RowWriter(path)
    assert RowReader(path, dict).read() == {"number": 1}
    again.write({"text": "x" * HALF_LENGTH_BYTES})
    assert RowReader(path, dict).read() == {"text": "x" * HALF_LENGTH_BYTES}


@given(
    documents=st.lists(st.dictionaries(st.text(max_size=5), st.integers()), min_size=2, max_size=4),
    data=st.data(),
)
def test_a_writer_that_dies_at_any_byte_leaves_the_last_document(
    tmp_path_factory: pytest.TempPathFactory, documents: list[dict[str, Any]], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("row") / "row"
    writer = RowWriter(path)
    for document in documents[:-1]:
        writer.write(document)
    before = path.read_bytes()
    writer.write(documents[-1])
    after = path.read_bytes()
    differs = np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8)
    changed: list[int] = np.flatnonzero(differs).tolist()
    kept = data.draw(st.sets(st.sampled_from(changed or [0])))
    torn = bytearray(before)
    for at in kept:
        torn[at] = after[at]
    path.write_bytes(torn)
    assert RowReader(path, dict).read() in (documents[-2], documents[-1])


def test_readers_never_see_a_mixture(tmp_path: Path) -> None:
    path = tmp_path / "row"
    writer = RowWriter(path)
    writer.write({"number": 0, "filler": ""})
    ended = threading.Event()
    seen: list[int] = []

    def read() -> None:
        reader = RowReader(path, dict)
        while not ended.is_set():
            document = reader.read()
            assert document is not None
            assert document["filler"] == str(document["number"]) * document["number"]
            seen.append(document["number"])

    thread = threading.Thread(target=read)
    thread.start()
    deadline_s = time.monotonic() + 60
    for number in count():
        if number > 2000 and (len(seen) > 100 or time.monotonic() > deadline_s):
            break
        writer.write({"number": number % 97, "filler": str(number % 97) * (number % 97)})
    ended.set()
    thread.join()
    assert len(seen) > 100


def test_both_documents_damaged_is_as_if_none_was_written(tmp_path: Path) -> None:
    path = tmp_path / "row"
    writer = RowWriter(path)
    writer.write({})
    writer.write({})
    content = bytearray(path.read_bytes())
    content[16] ^= 1
    content[HALF_LENGTH_BYTES + 16] ^= 1
    path.write_bytes(content)
    assert RowReader(path, dict).read() is None


def test_a_row_in_memory_has_room_for_any_document_and_takes_what_is_written() -> None:
    descriptor = os.memfd_create("row")
    path = in_memory(descriptor)
    reader = RowReader(path, dict)
    assert reader.read() is None
    writer = RowWriter(path)
    for length in (3, 3 * HALF_LENGTH_BYTES, 5):
        writer.write({"text": "x" * length})
        assert reader.read() == {"text": "x" * length}
    assert RowWriter(path)._counter == 3, "another server goes on with it"
    assert os.fstat(descriptor).st_blocks * 512 < 8 * HALF_LENGTH_BYTES
    os.close(descriptor)


def test_a_sector_that_cannot_be_read_ends_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cleaner.row"
    RowWriter(path).write({"pid": 1})
    real, bad = os.pread, path.stat().st_ino

    def refused(descriptor: int, length: int, offset: int) -> bytes:
        if os.fstat(descriptor).st_ino == bad:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", refused)
    with path.open("rb"):  # its number is not given to another file
        reader = RowReader(path, dict)
        assert reader.read() is None
        RowWriter(path).write({"pid": 2})
        assert reader.read() == {"pid": 2}
