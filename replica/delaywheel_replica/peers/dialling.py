"""A stream to a peer: opened, kept open, and opened anew for as long as the node lives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final

import grpc

from delaywheel_proto.v1 import peer_pb2 as pb
from delaywheel_replica.core.fields import MalformedError
from delaywheel_replica.peers.handshake import decode_answer
from delaywheel_replica.peers.options import CHANNEL_OPTIONS
from delaywheel_replica.peers.outbox import Outbox
from delaywheel_replica.peers.peer import Peer, Stream, Way
from delaywheel_replica.peers.states import PeerReason, PeerRefusal

SERVICE: Final = pb.DESCRIPTOR.services_by_name["Peers"].full_name

_PAUSE_S: Final = 0.1
"""Before a stream that broke is opened anew. gRPC paces the connecting itself: options.py."""

_REFUSED_PAUSE_S: Final = 1.0
"""Before a peer is tried again that was refused: somebody has to mend something first."""

_JOIN_S: Final = 5.0


class Dialler:
    """One stream to one peer, with a channel and a thread of its own."""

    def __init__(self, peer: Peer, stream: Stream, *, hello: bytes, max_bytes: int) -> None:
        """Does nothing yet.

        Args:
            peer: to whom.
            stream: which one.
            hello: what is said first.
            max_bytes: how much may wait to be sent.
        """
        self._peer = peer
        self._stream = stream
        self._hello = hello
        self._max_bytes = max_bytes
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._call: grpc.Call | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"peer-{peer.node}-{stream.lower()}", daemon=True
        )

    def start(self) -> None:
        """Dials until `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the stream."""
        with self._lock:
            self._ended.set()
            if self._call is not None:
                self._call.cancel()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        with grpc.insecure_channel(self._peer.address, options=CHANNEL_OPTIONS) as channel:
            open_stream: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
                # Without (de)serializers messages are the bytes themselves.
                f"/{SERVICE}/{self._stream}"
            )
            while not self._ended.is_set():
                refusal = self._converse(open_stream)
                if refusal is None:
                    self._ended.wait(_PAUSE_S)
                else:
                    self._peer.refused(Way.OUT, self._stream, refusal)
                    self._ended.wait(_REFUSED_PAUSE_S)

    def _converse(
        self, open_stream: grpc.StreamStreamMultiCallable[bytes, bytes]
    ) -> PeerRefusal | None:
        """Opens the stream and stays with it until it ends; returns why it was refused."""
        outbox = Outbox(self._max_bytes, self._peer.tallies[Way.OUT, self._stream])
        with self._lock:
            if self._ended.is_set():
                return None
            # It waits until somebody listens there: no thread of ours tries again and again.
            call = self._call = open_stream(self._requests(outbox), wait_for_ready=True)
        try:
            return self._stay(call, outbox)
        except StopIteration:
            return None
        except MalformedError as error:
            return PeerRefusal(PeerReason.MALFORMED, str(error))
        except grpc.RpcError:
            return _no_peer(self._peer) if call.code() is grpc.StatusCode.UNIMPLEMENTED else None
        finally:
            outbox.close()
            call.cancel()
            self._peer.left(self._stream, outbox)

    def _stay(self, answers: Iterator[bytes], outbox: Outbox) -> PeerRefusal | None:
        answer = decode_answer(next(answers))
        if isinstance(answer, PeerRefusal):
            return answer
        refusal = self._peer.welcomed(self._stream, answer, outbox)
        if refusal is None:
            next(answers, None)  # there is no second one: this waits for the end
        return refusal

    def _requests(self, outbox: Outbox) -> Iterator[bytes]:
        yield self._hello
        yield from outbox.taken()


def _no_peer(peer: Peer) -> PeerRefusal:
    text = f"{peer.address} speaks gRPC but is no peer's: perhaps {peer.node} takes callers there"
    return PeerRefusal(PeerReason.WRONG_PORT, text)
