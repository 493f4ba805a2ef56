"""Who is signed in, and who has failed to: in memory alone. docs/PAGE.md has the states."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from time import monotonic
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.web.nodes import UNKNOWN_TOKEN, NodeCalls, Viewer
from delaywheel_replica.web.refusals import PageRefusal, signed_out

SESSION_S: Final = 12 * 3600.0
SESSIONS_AT_MOST: Final = 1_000
"""Of all tokens: the oldest of the one with most of them gives way."""
FAILURES_AT_MOST: Final = 10
"""Of an address within `FAILURES_S`."""
FAILURES_S: Final = 60.0
ADDRESSES_AT_MOST: Final = 4_096
"""Of which failures are known: the one that failed first gives way."""
TOKEN_AT_MOST: Final = 4_096
_PLAIN: Final = re.compile(r"[!-~]+")


class _Session(NamedTuple):
    token: str
    by_link: bool
    ends_s: float


class Sessions:
    """The sessions of this process. For the event loop's thread.

    Attributes:
        secret: What the printed link has.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.secret: Final = secrets.token_urlsafe(32)
        self._clock: Final = clock
        self._sessions: Final[OrderedDict[str, _Session]] = OrderedDict()
        self._failures: Final[OrderedDict[str, deque[float]]] = OrderedDict()
        self._turns: Final[WeakValueDictionary[str, asyncio.Lock]] = WeakValueDictionary()

    async def known(
        self, token: str, address: str, nodes: NodeCalls
    ) -> tuple[Viewer, pb.WhoAmIResponse]:
        """Returns the viewer who shows this, and who that is at a node.

        An address has one turn: of guesses sent at the same time each counts before the next.

        Raises:
            PageRefusal: 401, which is a failure of the address; TOO_MANY_SIGN_INS, with when to
                try again; what else `NodeCalls.ask` raises.
        """
        async with self._turns.setdefault(address, asyncio.Lock()):
            self._refuse_guesses(address)
            try:
                viewer = self.shown(token, address)
                return viewer, await nodes.who(viewer)
            except PageRefusal as refusal:
                if refusal.status == 401:
                    self._failed(address)
                raise

    def shown(self, token: str, address: str) -> Viewer:
        """Returns the viewer who shows this, if nodes agree; SIGN_IN if it can be no token."""
        if not (0 < len(token) <= TOKEN_AT_MOST and _PLAIN.fullmatch(token)):
            raise signed_out("a token has visible ASCII characters alone")
        if hmac.compare_digest(token.encode(), self.secret.encode()):
            return Viewer(UNKNOWN_TOKEN, address, by_link=True)
        return Viewer(token, address, by_link=False)

    def begin(self, viewer: Viewer) -> str:
        """Signs a viewer in; returns what their cookie has."""
        session = secrets.token_urlsafe(32)
        ends_s = self._clock() + SESSION_S
        self._sessions[session] = _Session(viewer.token, viewer.by_link, ends_s)
        if len(self._sessions) > SESSIONS_AT_MOST:
            [(most, _)] = Counter(each.token for each in self._sessions.values()).most_common(1)
            del self._sessions[next(k for k, each in self._sessions.items() if each.token == most)]
        return session

    def viewer(self, session: str, address: str) -> Viewer | None:
        """Returns who has this cookie; None: nobody."""
        found = self._sessions.get(session)
        if found is None:
            return None
        if self._clock() >= found.ends_s:
            del self._sessions[session]
            return None
        return Viewer(found.token, address, by_link=found.by_link)

    def end(self, session: str) -> None:
        """Signs out."""
        self._sessions.pop(session, None)

    def _refuse_guesses(self, address: str) -> None:
        failures = self._failures.get(address, ())
        recent = [at_s for at_s in failures if at_s > self._clock() - FAILURES_S]
        if len(recent) >= FAILURES_AT_MOST:
            raise PageRefusal(
                429,
                "TOO_MANY_SIGN_INS",
                f"{address} has failed to sign in {FAILURES_AT_MOST} times within a minute: wait",
                retry_after_s=recent[0] + FAILURES_S - self._clock(),
            )

    def _failed(self, address: str) -> None:
        failures = self._failures.setdefault(address, deque(maxlen=FAILURES_AT_MOST))
        failures.append(self._clock())
        self._failures.move_to_end(address)
        if len(self._failures) > ADDRESSES_AT_MOST:
            self._failures.popitem(last=False)
