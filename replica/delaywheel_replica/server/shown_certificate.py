"""What a caller's certificate says: until when it counts, and whom it names.

gRPC's own reading of names ends at a U+0000: a certificate for `spiffe://shop/admin<NUL>.evil`
would be that of `spiffe://shop/admin`. So names are read here, of the certificate itself; those
with characters that cannot be printed, and those longer than `NAME_AT_MOST`, are none.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from delaywheel.storage.frames.bounded import BoundedTable

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

LEAF: Final = "x509_pem_cert"
"""What gRPC calls the caller's certificate, and those that it was signed with."""
CHAIN: Final = "x509_pem_cert_chain"
NAME_AT_MOST: Final = 2_048
"""As long as a SPIFFE ID may be."""
_KEPT_BYTES: Final = 16 << 20
_ENTRY_BYTES: Final = 1_000


class ShownCertificate(NamedTuple):
    """A caller's certificate.

    Attributes:
        expires_s: When it, or one that it was signed with, expires, Unix seconds.
        names: Its first name of each kind: `uri`, `dns`, `cn`.
    """

    expires_s: float
    names: Mapping[str, str]


_KEPT: Final = BoundedTable[bytes, ShownCertificate](_KEPT_BYTES)


def shown_certificate(shown: Mapping[str, Iterable[bytes]]) -> ShownCertificate | None:
    """Returns the certificate of a connection; None: it shows none."""
    leaf, chain = (b"".join(shown.get(name, ())) for name in (LEAF, CHAIN))
    if not leaf:
        return None
    both = leaf + chain
    if (certificate := _KEPT.get(both)) is None:
        certificate = _read(both)
        names_bytes = sum(map(len, certificate.names.values()))
        _KEPT.put(both, certificate, _ENTRY_BYTES + len(both) + names_bytes)
    return certificate


def _read(content: bytes) -> ShownCertificate:
    """Reads a certificate, and those behind it; one that cannot be read has expired."""
    from cryptography import x509  # noqa: PLC0415 - without TLS it is not there

    try:
        shown = x509.load_pem_x509_certificates(content)
        expires_s = min(each.not_valid_after_utc.timestamp() for each in shown)
    except (ValueError, x509.InvalidVersion):
        return ShownCertificate(-inf, {})
    try:
        names = [
            (kind, name)
            for kind, name in _names(shown[0])
            if 0 < len(name) <= NAME_AT_MOST and name.isprintable()
        ]
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType):
        names = []
    return ShownCertificate(expires_s, dict(reversed(names)))


def _names(shown: "Certificate") -> Iterator[tuple[str, str]]:
    from cryptography import x509  # noqa: PLC0415 - as above

    for subject in shown.subject.get_attributes_for_oid(x509.oid.NameOID.COMMON_NAME):
        yield "cn", str(subject.value)
    try:
        extension = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return
    for kind, of_kind in (("uri", x509.UniformResourceIdentifier), ("dns", x509.DNSName)):
        for name in extension.value.get_values_for_type(of_kind):
            yield kind, name
