"""The protocol between a client and one exchange, which is repeated until it is settled.

`Delivery` and `Question` are exchanges. A driver (`Calls`) asks for the next request, sends it
to the address chosen for it, and hands back the response or the failure, until `done`. The
exchange, not the driver, decides what may be sent again and what is then known.
"""

from typing import Final, Protocol, TypeVar

from delaywheel.client.exchange.endpoints import Report
from delaywheel.client.exchange.retry import AttemptFailure

RequestT_co = TypeVar("RequestT_co", covariant=True)
ResponseT_contra = TypeVar("ResponseT_contra", contravariant=True)


class Exchange(Protocol[RequestT_co, ResponseT_contra]):
    """Each call of `request` is followed by exactly one of `answered` and `failed`."""

    @property
    def done(self) -> bool:
        """Whether nothing is left to be sent."""

    def request(self) -> RequestT_co:
        """Returns the request of the next attempt."""

    def answered(self, response: ResponseT_contra) -> Report:
        """Takes the answer of an attempt."""

    def failed(self, failure: AttemptFailure) -> Report:
        """Takes the failure of an attempt."""

    def give_up(self, why: str) -> None:
        """Gives up for lack of time; the exchange is done then."""


TIME_OVER: Final = "the time for it is over"
CLOSED: Final = "the client is closed"
"""Why a driver gives up."""
