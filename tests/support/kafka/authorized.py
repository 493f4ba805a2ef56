"""A broker that denies its user everything without an ACL; unnamed clients may do anything."""

from __future__ import annotations

from typing import Final

from confluent_kafka.admin import (  # type: ignore[attr-defined] # its stubs re-export without saying so
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from local.loopback.kafka import KafkaBroker

USER: Final = "wheel"
_PASSWORD: Final = "only-here"
_LOGIN: Final = "org.apache.kafka.common.security.plain.PlainLoginModule required"
_PRINCIPAL: Final = f"User:{USER}"


class AuthorizingBroker(KafkaBroker):
    """Admits only `USER`, by SASL, on its second listener."""

    @property
    def user_settings(self) -> dict[str, str]:
        """The settings that a Kafka client of the user needs."""
        return {
            "bootstrap.servers": f"127.0.0.1:{self.proxied_port}",
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": USER,
            "sasl.password": _PASSWORD,
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
        denied = AclBindingFilter(
            *(kind, name, ResourcePatternType.LITERAL, _PRINCIPAL, "*"),
            *(AclOperation.ANY, AclPermissionType.DENY),
        )
        admin = AdminClient({"bootstrap.servers": self.address})
        for future in admin.delete_acls([denied]).values():
            assert future.result()

    def _set(
        self,
        permission: AclPermissionType,
        kind: ResourceType,
        name: str,
        operation: str,
        pattern: ResourcePatternType,
    ) -> None:
        what = AclOperation[operation]
        wanted = AclBinding(kind, name, pattern, _PRINCIPAL, "*", what, permission)
        admin = AdminClient({"bootstrap.servers": self.address})
        admin.create_acls([wanted])[wanted].result()

    def _properties(self) -> dict[str, str]:
        properties = super()._properties()
        plain = properties["advertised.listeners"].partition(",")[0]
        protocols = "PLAINTEXT:PLAINTEXT,PROXIED:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT"
        return {
            **properties,
            "listener.security.protocol.map": protocols,
            "advertised.listeners": f"{plain},PROXIED://127.0.0.1:{self.proxied_port}",
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.proxied.plain.sasl.jaas.config": (
                f'{_LOGIN} username="{USER}" password="{_PASSWORD}" user_{USER}="{_PASSWORD}";'
            ),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        }
