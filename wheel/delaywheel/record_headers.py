"""The headers of a Kafka record that confluent-kafka has read, when it can read them.

For a header whose name is no UTF-8 the client returns a list with a hole, and leaves an error
behind that a plain call may overlook: whatever Python does next fails with SystemError, or
crashes on the hole. Producers in other languages can send such names.
"""

from typing import Any, Protocol


class HasHeaders(Protocol):
    """A message of confluent-kafka."""

    def headers(self) -> Any:
        """Returns pairs of name and value, or None."""


def headers_of(message: HasHeaders) -> list[tuple[str, bytes | None]] | None:
    """Returns the headers of a record, in order; None: they cannot be read.

    To be asked once of a message that may have such a name: when asked again, the client hands out
    the list with the hole and no error.

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
