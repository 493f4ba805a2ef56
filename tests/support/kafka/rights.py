"""A user's rights in the broker: without one that is allowed, it is denied everything."""

from __future__ import annotations

from typing import Any, Self

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


class Rights:
    """Those of this process's user; it has none again after the `with` block.

    Attributes:
        address: Where clients may do anything.
    """

    def __init__(self, kafka: JoinedBroker) -> None:
        self.address = kafka.address
        self._principal = f"User:{kafka.user}"
        self._kafka = kafka

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._delete(ResourceType.ANY, None, ResourcePatternType.ANY, AclPermissionType.ANY)

    @property
    def user_settings(self) -> dict[str, str]:
        """The settings that a Kafka client of the user needs."""
        return {
            "bootstrap.servers": self._kafka.guarded_address,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": self._kafka.user,
            "sasl.password": PASSWORD,
        }

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
