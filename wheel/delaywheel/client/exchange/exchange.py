"""What a client drives over the network: something to send until it is answered or given up.

`Delivery` and `Question` are exchanges. A driver (`sync`, `aio`) asks for the next request,
sends it to the address whose turn it is, and hands back the response or the failure, until
`done`. Which of them may be sent again, and what is then known, is not the driver's to decide.
"""

from typing import Final, Protocol, TypeVar

from delaywheel.client.exchange.endpoints import Report
from delaywheel.client.exchange.retry import Failure

RequestT_co = TypeVar("RequestT_co", covariant=True)
ResponseT_contra = TypeVar("ResponseT_contra", contravariant=True)


class Exchange(Protocol[RequestT_co, ResponseT_contra]):
    """Between two calls of `request` comes exactly one of `answered` and `failed`."""

    @property
    def done(self) -> bool:
        """Nothing is left to be sent."""

    def request(self) -> RequestT_co:
        """The next attempt."""

    def answered(self, response: ResponseT_contra) -> Report:
        """The attempt was answered."""

    def failed(self, failure: Failure) -> Report:
        """The attempt failed."""

    def give_up(self, why: str) -> None:
        """There is no time for another attempt; afterwards it is done."""


TIME_OVER: Final = "the time for it is over"
CLOSED: Final = "the client is closed"
"""Why a driver gives up."""
