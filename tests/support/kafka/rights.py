"""A user's rights in the broker: without one that is allowed, it is denied everything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from confluent_kafka.admin import (  # type: ignore[attr-defined] # its stubs re-export without saying so
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from local.loopback.shared import PASSWORD, JoinedBroker
from local.reference import rows_of
from support.services.waiting import wait_until

_DOCUMENT: Final = Path(__file__).parents[3] / "docs" / "KAFKA.md"
_KINDS: Final = {
    "cluster": ResourceType.BROKER,
    "topics": ResourceType.TOPIC,
    "destination topics": ResourceType.TOPIC,
    "transactional ids": ResourceType.TRANSACTIONAL_ID,
    "group": ResourceType.GROUP,
}


class DocumentedRight(NamedTuple):
    """A row of the document's table.

    Attributes:
        kind: Of the resource.
        name: Its name, or what that begins with.
        is_prefix: Whether it is that.
        operations: What is allowed.
    """

    kind: ResourceType
    name: str
    is_prefix: bool
    operations: list[str]


def documented(cluster: str, topics: Mapping[str, str]) -> list[DocumentedRight]:
    """Returns what docs/KAFKA.md lists for the nodes of a cluster.

    Args:
        cluster: Its id.
        topics: The names of what the document calls by these words.
    """
    text = _DOCUMENT.read_text(encoding="utf-8")
    found = []
    for resource, operations, *_ in rows_of(text, "resource | operations"):
        kind = next(kind for word, kind in _KINDS.items() if resource.startswith(word))
        quoted = re.search(r"`(delaywheel-.+)`", resource)
        ours = next((name for word, name in topics.items() if word in resource), "kafka-cluster")
        name = quoted[1].replace("<cluster>", cluster) if quoted else ours
        wanted = [re.sub(r"(?<=[a-z])(?=[A-Z])", "_", one) for one in operations.split(", ")]
        is_prefix = "prefixed" in resource
        found.append(DocumentedRight(kind, name, is_prefix, [one.upper() for one in wanted]))
    return found


def documented_of(program: str, cluster: str) -> list[DocumentedRight]:
    """Returns what docs/KAFKA.md lists for a program that needs topics of the service alone.

    Args:
        program: What the document calls it, or a part of that.
        cluster: The cluster's id.
    """
    rows = rows_of(_DOCUMENT.read_text(encoding="utf-8"), "who | resource: operations")
    (listed,) = (rights for who, rights in rows if program in who)
    topics, operations = listed.partition(";")[0].split(": ")
    wanted = operations.upper().split(", ")
    names = [name.removeprefix("delaywheel-<cluster>") for name in re.findall("`(.+?)`", topics)]
    return [
        DocumentedRight(
            kind=ResourceType.TOPIC,
            name=f"delaywheel-{cluster}{name}",
            is_prefix=False,
            operations=wanted,
        )
        for name in names
    ]


class Rights:
    """Those of a user, who has none again after the `with` block.

    Attributes:
        address: Where clients may do anything.
        user_settings: The settings that a Kafka client of the user needs.
    """

    def __init__(self, address: str, user: str, user_settings: Mapping[str, str]) -> None:
        self.address = address
        self.user_settings = dict(user_settings)
        self._principal = f"User:{user}"

    @classmethod
    def of(cls, kafka: JoinedBroker) -> Self:
        """Returns those of this process's user of a broker that tests share."""
        login = {
            "bootstrap.servers": kafka.guarded_address,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": kafka.user,
            "sasl.password": PASSWORD,
        }
        return cls(kafka.address, kafka.user, login)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._delete(ResourceType.ANY, None, ResourcePatternType.ANY, AclPermissionType.ANY)

    def allow_all(self, documented: Iterable[DocumentedRight]) -> None:
        """Lets the user do what is listed."""
        for one in documented:
            for operation in one.operations:
                self.allow(one.kind, one.name, operation, prefixed=one.is_prefix)

    def allow(self, kind: ResourceType, name: str, operation: str, *, prefixed: bool) -> None:
        """Lets the user do something."""
        pattern = ResourcePatternType.PREFIXED if prefixed else ResourcePatternType.LITERAL
        self._set(AclPermissionType.ALLOW, kind, name, operation, pattern)

    def deny(self, kind: ResourceType, name: str, operation: str) -> None:
        """Denies it to the user despite any ACL, until it is given back."""
        self._set(AclPermissionType.DENY, kind, name, operation, ResourcePatternType.LITERAL)

    def give_back(self, kind: ResourceType, name: str) -> None:
        """Ends what was denied."""
        assert self._delete(kind, name, ResourcePatternType.LITERAL, AclPermissionType.DENY)

    def _set(
        self,
        permission: AclPermissionType,
        kind: ResourceType,
        name: str,
        operation: str,
        pattern: ResourcePatternType,
    ) -> None:
        what = AclOperation[operation]
        wanted = AclBinding(kind, name, pattern, self._principal, "*", what, permission)
        admin = AdminClient({"bootstrap.servers": self.address})
        admin.create_acls([wanted])[wanted].result()
        # The controller has answered: the broker hears of it later.
        meant = AclBindingFilter(kind, name, pattern, self._principal, "*", what, permission)
        wait_until("the broker knows it", lambda: admin.describe_acls(meant).result())

    def _delete(
        self,
        kind: ResourceType,
        name: Any,
        pattern: ResourcePatternType,
        permission: AclPermissionType,
    ) -> list[AclBinding]:
        meant = AclBindingFilter(
            kind, name, pattern, self._principal, "*", AclOperation.ANY, permission
        )
        admin = AdminClient({"bootstrap.servers": self.address})
        deleted: list[AclBinding] = admin.delete_acls([meant])[meant].result()
        return deleted
