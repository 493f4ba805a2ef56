"""Settings of a checker: those of a consumer that mean something here."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from delaywheel.consumer.settings import ConsumerSettings, GroupOptions, Options, read_settings
from delaywheel.ingress import halves_topic
from delaywheel.record_headers import GROUP_NAME, HALF_GROUP


def checker_settings(
    group: str, bootstrap: str, cluster: str, options: GroupOptions
) -> ConsumerSettings:
    """Returns the settings of a group's checkers; raises TypeError for an option that they lack."""
    if GROUP_NAME.fullmatch(group.encode(errors="replace")) is None:
        raise ValueError(f"group={group!r}: 1 to 200 letters, digits, '.', '_' and '-'")
    unknown = sorted(set(options) - set(GroupOptions.__annotations__))
    if unknown:
        raise TypeError(f"not options of a checker: {', '.join(unknown)}")
    # What the message says to its own consumers means nothing here.
    given = {**options, "cluster": cluster, "ttl_header": None}
    settings = read_settings(halves_topic(cluster), group, bootstrap, cast("Options", given))
    return replace(settings, meant_for=(HALF_GROUP, group.encode()), asks_about_halves=True)
