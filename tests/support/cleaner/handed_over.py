"""The server's end of a hand-over: writes batches into a wheel, and answers HELD."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence

from delaywheel.headers import decode_headers
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.ingress.underway import RecordAnswer
from delaywheel_replica.handover.answers import encode_answers
from delaywheel_replica.handover.batches import HEAD, Head, decode
from delaywheel_replica.link import HandoverBegins
from support.due.wheels import Sent


class HandedOver:
    """Takes batches on a thread until the cleaner closes the hand-over."""

    def __init__(
        self, begins: HandoverBegins, write: Callable[[Sequence[Sent], Kind], object]
    ) -> None:
        self._socket = socket.socket(fileno=begins.fd)
        self._write = write
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with self._socket, contextlib.suppress(EOFError, OSError):
            while True:
                head = Head.parse(self._read(HEAD.size))
                rows = _rows(decode(head, self._read(head.length_bytes)), head.kind)
                self._write(rows, head.kind)
                self._socket.sendall(encode_answers(head.number, [RecordAnswer.HELD] * len(rows)))

    def _read(self, length: int) -> bytes:
        received = bytearray()
        while len(received) < length:
            content = self._socket.recv(length - len(received))
            if not content:
                raise EOFError
            received += content
        return bytes(received)


def _rows(columns: Columns, kind: Kind) -> list[Sent]:
    identities = [
        (int(due_ms), bytes(id_)) for due_ms, id_ in zip(columns.due_ms, columns.ids, strict=True)
    ]
    if kind is Kind.CANCELS:
        return [Sent(due_ms, id_) for due_ms, id_ in identities]
    rows = []
    for row, (due_ms, id_) in enumerate(identities):
        at, content = int(columns.starts[row]), []
        for lengths in (columns.key_lengths, columns.value_lengths, columns.headers_lengths):
            length = int(lengths[row])
            content.append(None if length < 0 else bytes(columns.blob[at : at + length]))
            at += max(length, 0)
        key, value, headers = content
        rows.append(
            Sent(
                due_ms,
                id_,
                columns.topics[int(columns.topic_numbers[row])],
                key,
                value,
                tuple(decode_headers(headers or b"")),
                int(columns.partitions[row]),
                int(columns.timestamps_ms[row]),
            )
        )
    return rows
