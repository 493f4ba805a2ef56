"""Who makes a call: the one place that finds out, and that refuses calls for it.

| the call shows | the caller is |
|---|---|
| the secret of this process (`dw-passed`) | a node, which has judged its own caller: may do all |
| a bearer token (`authorization`) | `token:` and its owner in `tokens`; TOKEN_UNKNOWN without |
| a certificate | its first name of the kinds in `principal_from`, in that order, as `uri:NAME` |
| none of these | `anonymous` |

Without `grants` everybody may do everything, and nothing is looked at but the secret.

Rights are looked up when they are asked for: a stream is open for long, and what was granted, or a
token, may be gone since it began. So may the certificate of its connection: TLS looks at that when
a connection is made, and gRPC takes up earlier ones (session tickets) without a look. Here every
call is refused once it has expired, whatever it shows besides.
"""

import hmac
import secrets
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from hashlib import sha256
from math import inf
from typing import Any, Final, NamedTuple, Protocol

from delaywheel.reasons import Reason
from delaywheel_replica.config import Config
from delaywheel_replica.patterns import Pattern
from delaywheel_replica.rights import EVERYTHING, Right, Rights
from delaywheel_replica.server.access.files import WatchedFile
from delaywheel_replica.server.access.grants import Grants
from delaywheel_replica.server.access.needs import NEEDS
from delaywheel_replica.server.access.quotas import Quota, Quotas, TopicQuota
from delaywheel_replica.server.access.spending import Spending
from delaywheel_replica.server.access.tables import ANONYMOUS
from delaywheel_replica.server.access.tokens import digest_of, parse_tokens
from delaywheel_replica.server.node.calls_to_nodes import PASSED
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError, quoted
from delaywheel_replica.server.shown_certificate import ShownCertificate, shown_certificate

_BEARER: Final = "bearer "
VIA: Final = "dw-via"


class Shown(Protocol):
    """What a call shows of its caller: gRPC's context."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Returns what was sent with the call."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Returns what its connection shows."""


class Purse(NamedTuple):
    """What a principal spends from: the quotas as they are now, less what was spent."""

    principal: str
    quotas: Callable[[], Quotas]
    spending: Spending


class Caller:
    """Who makes a call.

    Attributes:
        principal: Their name; None: nobody asked for it, as there are no grants.
        how: How they showed it: "node", "token", "certificate", or "nothing".
        has_certificate: Whether their connection shows one, whatever they are known by.
        expires_s: When that expires, Unix seconds.
    """

    __slots__ = (
        *("_purse", "_rights", "expires_s"),
        *("has_certificate", "how", "principal"),
    )

    def __init__(
        self,
        principal: str | None,
        how: str,
        rights: Callable[[], Rights],
        *,
        has_certificate: bool = False,
        purse: Purse | None = None,
        expires_s: float = inf,
    ) -> None:
        self._purse: Final = purse
        self.expires_s: Final = expires_s
        self.principal: Final = principal
        self.has_certificate: Final = has_certificate
        self.how: Final = how
        self._rights: Final = rights

    @property
    def is_node(self) -> bool:
        """Whether another node passes the call on, or asks for itself."""
        return self.how == "node"

    @property
    def rights(self) -> Rights:
        """Returns what they may do now; refuses TOKEN_UNKNOWN, CERTIFICATE_EXPIRED."""
        if time.time() >= self.expires_s:
            raise RequestRefusedError(Reason.CERTIFICATE_EXPIRED)
        return self._rights()

    @property
    def quota(self) -> Quota | None:
        """What they may take of the node; None: there is no quota."""
        purse = self._purse
        return None if purse is None else purse.quotas().of(purse.principal)

    @property
    def topic_quotas(self) -> Iterable[tuple[tuple[Pattern, ...], TopicQuota]]:
        """The quotas of all topics."""
        return () if self._purse is None else self._purse.quotas().of_topics

    def spend(self, messages: int, length_bytes: int, *, questions: int = 0) -> None:
        """Counts a request against their quota; refuses QUOTA_EXCEEDED."""
        if (purse := self._purse) is not None and (quota := self.quota) is not None:
            purse.spending.spend(
                purse.principal, quota, messages, length_bytes, questions=questions
            )

    def charge(self, messages: int) -> None:
        """Counts messages that a request turned out to concern besides."""
        quota = self.quota
        if (purse := self._purse) is not None and quota is not None and messages > 0:
            purse.spending.charge(purse.principal, quota, messages)

    def refuse_without(self, right: Right, what: str) -> RequestRefusedError:
        """Returns the refusal for something that they may not do."""
        return _forbidden(self, f"has no right {right.value!r}: {what}")


def _everything() -> Rights:
    return EVERYTHING


ANYBODY: Final = Caller(None, "nothing", _everything)
"""Who calls while there are no grants."""
A_NODE: Final = Caller(None, "node", _everything)


class CallOrigin(NamedTuple):
    """Where a call comes from: what it takes of the node is counted by this.

    `principal` is empty if nobody asked for a name, or a node makes the call.
    """

    address: str
    principal: str = ""

    @property
    def sharer(self) -> tuple[str, str]:
        """Who shares the node: a principal with all its connections, or else a connection."""
        return self.principal, "" if self.principal else self.address


class CallContext(NamedTuple):
    """A call as the service sees it.

    Attributes:
        left_s: How long they wait; None: they do not say.
        shown: What it shows: gRPC's own context.
    """

    caller: Caller
    address: str
    left_s: float | None = None
    shown: Any = None

    @property
    def via(self) -> str:
        """Through what it was made, as it says itself; empty: it does not say."""
        metadata = () if self.shown is None else self.shown.invocation_metadata() or ()
        return next((str(value) for name, value in metadata if name == VIA), "")

    @property
    def origin(self) -> CallOrigin:
        """Where it comes from."""
        return CallOrigin(self.address, self.caller.principal or "")

    @property
    def sharer(self) -> tuple[str, str]:
        """Who shares the node: see `CallOrigin.sharer`."""
        return self.origin.sharer

    def sharers(self, numbers: Sequence[int], count: int) -> list[Hashable]:
        """Returns who shares the node for each part of a request; a node tells them by numbers."""
        if self.caller.is_node and len(numbers) == count:
            return [(self.address, number) for number in numbers]
        return [self.sharer] * count


class Access:
    """Finds out who makes a call, and whether they may. For any thread."""

    def __init__(self, config: Config) -> None:
        """Reads the files of the settings; one that is not in order is an AccessFileError."""
        self.call_secret: Final = secrets.token_bytes(32)
        """Who shows it is a node: this process tells it to its peers alone."""
        self._shown_by_nodes: Final = self.call_secret.hex()
        self._grants: Final[WatchedFile[Grants] | None] = (
            None if config.grants is None else WatchedFile("grants", config.grants, Grants.parse)
        )
        self._tokens: Final[WatchedFile[Mapping[str, str]] | None] = (
            None if config.tokens is None else WatchedFile("tokens", config.tokens, parse_tokens)
        )
        self.spending: Final = Spending()
        """What principals have taken of their quotas."""
        self._asks_for_certificates: Final = config.tls_client_ca is not None
        self._kinds: Final = config.principal_from

    @property
    def refused(self) -> str | None:
        """Why a file on the disk is not taken, and an earlier one counts; None: all are."""
        files = self._grants, self._tokens
        return next((file.refused for file in files if file and file.refused), None)

    @property
    def digest(self) -> str:
        """Tells the files that are in force from others; "open" without grants."""
        if self._grants is None:
            return "open"
        files = [file.digest for file in (self._grants, self._tokens) if file is not None]
        return sha256("\n".join([*files, *self._kinds]).encode()).hexdigest()

    @property
    def is_limited(self) -> bool:
        """Whether there are grants."""
        return self._grants is not None

    def topic_quotas(self) -> Callable[[str], TopicQuota | None] | None:
        """Returns how to find a topic's quota; None: no topic has one."""
        quotas = None if self._grants is None else self._grants.current.quotas
        return quotas.of_topic if quotas and quotas.of_topics else None

    def in_flight_bytes_of(self, principal: str) -> int | None:
        """Returns how many bytes a principal may have in flight; None: no limit."""
        quota = None if self._grants is None else self._grants.current.quotas.of(principal)
        return None if quota is None else quota.in_flight_bytes

    def _quotas(self) -> Quotas:
        assert self._grants is not None
        return self._grants.current.quotas

    def admit(self, call: str, shown: Shown) -> Caller:
        """Returns who makes a call, if they may make it at all.

        Refuses: FORBIDDEN, TOKEN_UNKNOWN, NODE_UNPROVEN, CERTIFICATE_EXPIRED.
        """
        need = NEEDS[call]
        is_named = self._grants is not None or self._asks_for_certificates
        if not is_named and not need.by_nodes:
            return ANYBODY
        caller = self._caller_of(shown, by_nodes=need.by_nodes)
        rights = caller.rights
        if rights is EVERYTHING or need.is_open:
            return caller
        if need.right is not None and not rights.may_somewhere(need.right):
            raise caller.refuse_without(need.right, f"in any topic, for {call}")
        if rights.are_none:
            raise _forbidden(caller, "has no right at all")
        return caller

    def _caller_of(self, shown: Shown, *, by_nodes: bool) -> Caller:
        metadata = dict(shown.invocation_metadata() or ())
        asks = self._asks_for_certificates or self._grants is not None
        certificate = shown_certificate(shown.auth_context()) if asks else None
        expires_s = inf if certificate is None else certificate.expires_s
        certified = self._certified(certificate)
        if time.time() >= expires_s:
            raise _unnamed(Reason.CERTIFICATE_EXPIRED, certified)
        if by_nodes and PASSED in metadata:
            if hmac.compare_digest(_text(metadata[PASSED]), self._shown_by_nodes):
                return A_NODE
            if self._grants is not None:
                raise _unnamed(Reason.NODE_UNPROVEN, certified)
        if self._grants is None:
            return Caller(None, "nothing", _everything, expires_s=expires_s)
        authorization = _text(metadata.get("authorization", ""))
        if authorization[: len(_BEARER)].lower() == _BEARER:
            digest = digest_of(authorization[len(_BEARER) :].strip())

            def holder() -> str:
                known = {} if self._tokens is None else self._tokens.current
                if (name := known.get(digest or "")) is None:
                    raise _unnamed(Reason.TOKEN_UNKNOWN, certified)
                return f"token:{name}"

            return self._named(holder, "token", expires_s, has_certificate=certificate is not None)
        how = "nothing" if certified is None else "certificate"
        return self._named(lambda: certified or ANONYMOUS, how, expires_s)

    def _certified(self, certificate: ShownCertificate | None) -> str | None:
        """Returns the principal that a certificate names; None: none, or nobody asks for it."""
        if self._grants is None or certificate is None:
            return None
        names = certificate.names
        return next((f"{kind}:{names[kind]}" for kind in self._kinds if kind in names), None)

    def _named(
        self, name: Callable[[], str], how: str, expires_s: float, *, has_certificate: bool = False
    ) -> Caller:
        """Returns the caller of a name, which refuses once nobody has it any more."""
        grants, principal = self._grants, name()
        assert grants is not None
        return Caller(
            principal,
            how,
            lambda: grants.current.rights_of(name()),
            has_certificate=has_certificate,
            purse=Purse(principal, self._quotas, self.spending),
            expires_s=expires_s,
        )


def _unnamed(reason: Reason, certified: str | None) -> RequestRefusedError:
    """Returns the refusal of what a call shows, with the name in its certificate for the log."""
    return RequestRefusedError.of(Refusal(reason, principal=certified))


def _forbidden(caller: Caller, text: str) -> RequestRefusedError:
    who = caller.principal or ANONYMOUS
    refusal = Refusal(Reason.FORBIDDEN, f"{quoted(who)} {text}", principal=who)
    return RequestRefusedError.of(refusal)


def _text(value: str | bytes) -> str:
    """Returns a text in metadata, of ASCII characters alone, as comparing takes no others."""
    text = value if isinstance(value, str) else value.decode(errors="replace")
    return text if text.isascii() else ""
