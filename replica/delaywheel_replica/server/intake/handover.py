"""Accepts the ingress records that this node's cleaner hands over (handover/).

From here on they are ordinary messages: the same wheel, ledger, metrics and look-ups. The leader
has validated them already, so topics and rates are not checked here. A batch is read once there is
room for its bytes, and each batch is answered separately.

| result of the write | answer to the cleaner |
|---|---|
| W members hold the record | HELD |
| the record is refused with DUE_TOO_OLD | SEALED |
| the record is refused with SLOT_FULL | FULL |
| another refusal; nothing was written (`Reason.outcome_known`) | NOT_NOW |
| another refusal; the outcome is unknown | UNKNOWN |

A record that was read may be written even if the connection breaks: this cleaner, or the next
leader's, hands the record over again, and the copies count as one message.

Half messages are noted once they are held, so that a commit lets go what it commits, whether it is
a record, too, or a call (commit/own_halves.py). Both records may be in one reading: commits wait
for the halves that were handed over before them. A half whose commit came first is let go once it
is held.
"""

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from functools import partial
from typing import Final

from delaywheel.reasons import Reason
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.ingress.underway import RecordAnswer
from delaywheel_replica.core.protocol.codec import MalformedError
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.handover.answers import encode_answers
from delaywheel_replica.handover.batches import FORMAT, HEAD, Head, decode
from delaywheel_replica.link import HandoverBegins
from delaywheel_replica.process.defects import fatal
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.access.callers import CallOrigin
from delaywheel_replica.server.commit.committer import Committed
from delaywheel_replica.server.commit.own_halves import CommitWriting, halves_among
from delaywheel_replica.server.intake.producing import IntakeStages
from delaywheel_replica.server.node.naming import key_of
from delaywheel_replica.server.node.node_view import wall_ms
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError, refusal_of
from delaywheel_replica.server.node.turns import start

_CALLER: Final = CallOrigin("ingress")
# The cleaner hands a refused batch over again: answer only after conditions may have changed.
_REFUSED_S: Final = 0.1
_ANSWERS: Final = {Reason.DUE_TOO_OLD: RecordAnswer.SEALED, Reason.SLOT_FULL: RecordAnswer.FULL}

_log = get_logger(__name__)


class HandoverServer:
    """Accepts handed-over records. For the event loop's thread."""

    def __init__(self, stages: IntakeStages, commits: CommitWriting) -> None:
        """Prepares to serve.

        Args:
            stages: the stages that callers' requests pass through.
        """
        self._stages = stages
        self._commits = commits
        # Batches with half messages that are being written.
        self._halves = set[asyncio.Future[None]]()
        self._serving: asyncio.Task[None] | None = None

    def begin(self, message: HandoverBegins) -> None:
        """Serves the socket of a new hand-over instead of the previous one."""
        self.close()
        connection = socket.socket(fileno=message.fd)
        if message.format != FORMAT:
            _log.error("hand-over of another release", format=message.format, ours=FORMAT)
            connection.close()
            return
        self._serving = asyncio.create_task(self._serve(connection))
        self._serving.add_done_callback(partial(_ended, connection))

    def close(self) -> None:
        """Closes the socket."""
        if self._serving is not None:
            self._serving.cancel()
            self._serving = None

    async def _serve(self, connection: socket.socket) -> None:
        """Reads batches until the cleaner ends the hand-over or sends malformed data."""
        reader, writer = await asyncio.open_connection(sock=connection)
        answering = set[asyncio.Task[None]]()
        _log.debug("hand-over begins")
        try:
            while True:
                head = Head.parse(await reader.readexactly(HEAD.size))
                await self._stages.admission.wait_for_room(_CALLER, head.cost_bytes)
                content = await reader.readexactly(head.length_bytes)
                start(self._answer(writer, head, content), answering)
                del content
        except asyncio.IncompleteReadError:
            _log.debug("hand-over ends")
        except MalformedError as error:
            _log.error("hand-over broken", error=str(error))
        except OSError as error:
            _log.warning("hand-over broken", error=str(error))
        finally:
            for task in answering:
                task.cancel()
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, writer: asyncio.StreamWriter, head: Head, content: bytes) -> None:
        """Writes a batch, and answers for each of its records."""
        writing = self._written(head, content)
        del content
        try:
            failed = await writing
            answers = [_answer_of(failed.get(row)) for row in range(head.records)]
        except MalformedError as error:
            _log.error("hand-over broken", error=str(error))
            writer.transport.abort()
            return
        except Exception as error:  # noqa: BLE001 - as in calls.py
            await asyncio.sleep(_REFUSED_S)
            answers = [_answer_of_all(refusal_of(error))] * head.records
        self._stages.counts.handed.update(answers)
        writer.write(encode_answers(head.number, answers))

    async def _written(self, head: Head, content: bytes) -> Mapping[int, Refusal]:
        """Returns why single records were not written.

        Raises:
            MalformedError: the bytes are no batch.
            RequestRefusedError: no record was written, or the outcome is unknown.
        """
        stages = self._stages
        # Cancels are accepted while messages are not: the write decides.
        refusal = stages.refusal() if head.kind is Kind.MESSAGES else None
        if refusal is not None:
            raise RequestRefusedError.of(refusal)
        with stages.admission.admit(_CALLER, head.cost_bytes) as ticket:
            columns = decode(head, content)
            del content
            if head.kind is Kind.COMMITS:
                return await self._commit(columns)
            halves = halves_among(columns) if head.kind is Kind.MESSAGES else {}
            answer = stages.writing.submit(columns, head.kind)
            del columns
            ticket.hand_on(answer)
            if halves:
                return await self._held(halves, answer)
            committed = await asyncio.shield(answer)
        return committed.failed

    async def _held(
        self, halves: Mapping[int, tuple[MessageKey, int]], answer: "asyncio.Future[Committed]"
    ) -> Mapping[int, Refusal]:
        """Notes the halves of a batch once they are held; commits wait for that, or came before."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._halves.add(done)
        try:
            committed = await asyncio.shield(answer)
            held = dict(each for row, each in halves.items() if row not in committed.failed)
            self._stages.halves.accepted(committed.wheel, held, wall_ms())
            early = self._stages.halves.take_early_commits(held)
        finally:
            self._halves.discard(done)
            done.set_result(None)
        if early:  # what is refused here is delivered at the end of its hold: its commit is held
            await self._commits.write(dict(enumerate(early)), wall_ms())
        return committed.failed

    async def _commit(self, columns: Columns) -> Mapping[int, Refusal]:
        """Writes commits, once the halves that came before them are held, or are not."""
        if self._halves:
            await asyncio.wait(self._halves)
        keys = {row: key_of(columns, row) for row in range(len(columns))}
        failed = await self._commits.write(keys, wall_ms())
        if any(refusal.reason not in _ANSWERS for refusal in failed.values()):
            await asyncio.sleep(_REFUSED_S)
        return failed


@fatal
def _ended(connection: socket.socket, serving: "asyncio.Task[None]") -> None:
    connection.close()  # it may not even have begun
    if not serving.cancelled():
        serving.result()


def _answer_of(refusal: Refusal | None) -> RecordAnswer:
    """Returns the answer for one record."""
    if refusal is None:
        return RecordAnswer.HELD
    return _ANSWERS.get(refusal.reason) or _answer_of_all(refusal)


def _answer_of_all(refusal: Refusal) -> RecordAnswer:
    """Returns the answer for each record of a batch that was refused as a whole."""
    return RecordAnswer.NOT_NOW if refusal.reason.outcome_known else RecordAnswer.UNKNOWN
