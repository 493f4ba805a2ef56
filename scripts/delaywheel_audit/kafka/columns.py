"""A record of Kafka as a row, with what our own headers say in it.

| column | type | |
|---|---|---|
| topic, partition, offset | string, int, long | |
| timestamp_ms, timestamp_type | long, string | CREATE_TIME, LOG_APPEND_TIME; of old: null, NONE |
| key, value | binary | null as in Kafka |
| headers | array of (name string, value binary) | in order, with repeats |
| dw_id | binary | 16 bytes |
| dw_due_ms, dw_accepted_ms, dw_forwarded_ms, dw_committed_ms | long | Unix ms |
| dw_cluster | string | which delivered it; null, too, for a release that did not say |
| dw_wheel | string | |
| dw_malformed | boolean | one of these headers cannot be read, or is there more than once |

The `dw_` columns are read from the headers of delaywheel: null where the header is absent, not
written as delaywheel writes it, or there more than once.

All of it is SQL, which Spark compiles: no row goes through Python. Only functions that it compiles
are used: those that take a lambda are interpreted.
"""

from __future__ import annotations

from pyspark.sql import DataFrame

_RECORD = (
    "topic",
    "partition",
    "offset",
    "IF(timestampType < 0, NULL, unix_millis(timestamp)) AS timestamp_ms",
    "decode(timestampType, 0, 'CREATE_TIME', 1, 'LOG_APPEND_TIME', 'NONE') AS timestamp_type",
    "key",
    "value",
    "CAST(coalesce(headers, array()) AS array<struct<name: string, value: binary>>) AS headers",
)

_NUMBER = r"\A(0|[1-9][0-9]{0,17})\z"
_OWN = {
    "dw-id": r"\A[0-9a-f]{32}\z",
    "dw-due": _NUMBER,
    "dw-accepted": _NUMBER,
    "dw-wheel": r"\A([a-z0-9][a-z0-9-]{0,30}/)?"
    r"([a-z0-9][a-z0-9-]{0,30}\.[1-9][0-9]{0,17}|ingress)\z",
    "dw-forwarded": _NUMBER,
    "dw-committed": _NUMBER,
}
"""The headers of delaywheel; names of clusters and wheels as `delaywheel.identity` has them,
`ingress` for no wheel. `$` would match before a line's end, too."""


def _text(name: str) -> str:
    place = f"CAST(array_position(headers.name, '{name}') - 1 AS INT)"
    value = f"CAST(get(headers.value, {place}) AS STRING)"
    others = f"size(array_remove(headers.name, '{name}'))"
    is_readable = f"size(headers) - {others} = 1 AND {value} RLIKE r'{_OWN[name]}'"
    return f"IF({is_readable}, {value}, NULL) AS `{name}`"


_TEXTS = [_text(name) for name in _OWN]
_IS_MALFORMED = " OR ".join(
    f"(`{name}` IS NULL AND array_contains(headers.name, '{name}'))" for name in _OWN
)
_READ = (
    "unhex(`dw-id`) AS dw_id",
    "CAST(`dw-due` AS BIGINT) AS dw_due_ms",
    "CAST(`dw-accepted` AS BIGINT) AS dw_accepted_ms",
    "IF(contains(`dw-wheel`, '/'), substring_index(`dw-wheel`, '/', 1), NULL) AS dw_cluster",
    "substring_index(`dw-wheel`, '/', -1) AS dw_wheel",
    "CAST(`dw-forwarded` AS BIGINT) AS dw_forwarded_ms",
    "CAST(`dw-committed` AS BIGINT) AS dw_committed_ms",
    f"{_IS_MALFORMED} AS dw_malformed",
)


def records_of(rows: DataFrame) -> DataFrame:
    """Returns the connector's rows in our columns, without those of our headers."""
    return rows.selectExpr(*_RECORD)


def with_own_headers(records: DataFrame) -> DataFrame:
    """Adds the columns of our headers to records."""
    columns = [f"`{name}`" for name in records.columns]
    return records.selectExpr(*columns, *_TEXTS).selectExpr(*columns, *_READ)
