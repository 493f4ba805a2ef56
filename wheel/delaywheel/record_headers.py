"""The headers of a Kafka record that confluent-kafka has read, if they can be decoded.

For a header whose name is not UTF-8, the client returns a list with a NULL entry and leaves a
pending error that a plain call may overlook: Python's next operation then fails with SystemError,
or crashes on the entry. Producers in other languages can send such names.
"""

from typing import Any, Protocol


class HasHeaders(Protocol):
    """A message of confluent-kafka."""

    def headers(self) -> Any:
        """Returns pairs of name and value, or None."""


def headers_of(message: HasHeaders) -> list[tuple[str, bytes | None]] | None:
    """Returns the headers of a record, in order; None if they cannot be decoded.

    Call it once for a message that may have such a name: a second call to the client returns the
    broken list without the error.

    Example:
        >>> class Record:
        ...     def headers(self):
        ...         return [("trace", b"1")]
        >>> headers_of(Record())
        [('trace', b'1')]
    """
    try:
        (headers,) = map(type(message).headers, (message,))  # `map` looks for the error at once
    except SystemError:
        return None
    found: list[tuple[str, bytes | None]] = headers or []
    return found
