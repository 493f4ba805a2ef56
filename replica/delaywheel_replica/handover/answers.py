"""Encodes the server's answers, which it sends on the same socket.

| bytes | little-endian |
|---|---|
| 4 | the number of the batch |
| 4 | how many records it has |
| 1 each | the answer to each record, in order: its index in `RecordAnswer` |
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Final

from delaywheel_replica.core.ingress.underway import RecordAnswer
from delaywheel_replica.core.protocol.codec import MalformedError

ANSWER_HEAD: Final = struct.Struct("<II")

_ANSWERS: Final = tuple(RecordAnswer)
_CODES: Final = {answer: bytes((code,)) for code, answer in enumerate(_ANSWERS)}


def encode_answers(number: int, answers: Sequence[RecordAnswer]) -> bytes:
    """Encodes the answers to a batch's records, in order."""
    codes = b"".join([_CODES[answer] for answer in answers])
    return ANSWER_HEAD.pack(number, len(answers)) + codes


def take_answers(received: bytearray, most: int) -> Iterator[tuple[int, tuple[RecordAnswer, ...]]]:
    """Yields the number of each batch with complete answers, and these; removes their bytes.

    `most` is the size of the largest batch, in records. Raises MalformedError if they are no
    answers.
    """
    while len(received) >= ANSWER_HEAD.size:
        number, records = ANSWER_HEAD.unpack_from(received)
        end = ANSWER_HEAD.size + records
        if records > most:
            raise MalformedError(f"an answer of {records} records")
        if len(received) < end:
            return
        codes = bytes(received[ANSWER_HEAD.size : end])
        del received[:end]
        try:
            yield number, tuple([_ANSWERS[code] for code in codes])
        except IndexError as error:
            raise MalformedError("an answer with an unknown code") from error
