"""Locates everything, from the options and a node's settings file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from delaywheel.identity import NameInvalidError, check_name
from delaywheel_audit.matching.terms import Terms
from delaywheel_audit.options import Options
from delaywheel_replica.config_sources import ConfigError, load_config


class SettingsUnreadableError(Exception):
    """The settings file or an option is missing something required."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The cluster, ledger and Kafka to reconcile.

    Attributes:
        cluster: Its id.
        ledger: Where its ledger is published.
        client: Settings of Kafka's client.
        seal_ms: How often nodes publish the ledger; without a settings file, by default.
        terms: What is asked, with what the settings know beside it.
    """

    cluster: str
    ledger: str
    client: Mapping[str, str]
    terms: Terms
    seal_ms: int = 60_000

    @classmethod
    def of(cls, options: Options) -> Setting:
        """Combines both; options win.

        Raises:
            SettingsUnreadableError: Something is missing or refused.
        """
        if options.settings is None:
            assert options.cluster is not None
            assert options.ledger is not None
            return cls(
                _checked(options.cluster), options.ledger, dict(options.kafka), options.terms
            )
        try:
            config = load_config(file=options.settings)
        except (ConfigError, OSError) as error:
            faults = "; ".join(str(error).splitlines())
            raise SettingsUnreadableError(f"{options.settings}: {faults}") from error
        terms = replace(options.terms, late_window_ms=config.late_window_seconds * 1000)
        if terms.span_ms is None:
            terms = replace(terms, span_ms=config.span_seconds * 1000)
        return cls(
            _checked(options.cluster or config.cluster_id),
            options.ledger or config.ledger_place,
            {**config.kafka, **options.kafka},
            terms,
            int(config.ledger_seal_seconds * 1000),
        )


def _checked(cluster: str) -> str:
    try:
        return check_name(cluster, what="cluster")
    except NameInvalidError as error:
        raise SettingsUnreadableError(str(error)) from error
