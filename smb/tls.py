"""TLS by the standard ssl module: files in PEM, contexts made of them, errors that name the file."""

from __future__ import annotations

import logging
import os
import re
import socket
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from smb.errors import SmbError, TransportError

log = logging.getLogger(__name__)

Path = str | os.PathLike[str]
_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
VARIABLES = {"ca": "SMB_TLS_CA", "certificate": "SMB_TLS_CERT", "key": "SMB_TLS_KEY"}


@dataclass(frozen=True)
class Tls:
    """Files in PEM. None of them is read before a context is made.

    certificate  one's own, with what leads to its authority behind it; a daemon needs one, a client only
                 where the daemon asks for it
    key          the certificate's, without a passphrase; None: it stands in the certificate's file
    ca           whose signature the other end must show. None means at a client the system's authorities,
                 at a daemon that clients are not asked for a certificate
    """

    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def server(self) -> ssl.SSLContext:
        """A daemon's context. Raises SmbError."""
        if self.certificate is None:
            raise SmbError("a daemon needs a certificate for TLS (--tls-cert)")
        context = _context(ssl.PROTOCOL_TLS_SERVER)
        self._own(context, self.certificate)
        if self.ca is not None:
            _authorities(context, self.ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client(self) -> ssl.SSLContext:
        """A client's context: the daemon's certificate must be signed and carry the host's name."""
        context = _context(ssl.PROTOCOL_TLS_CLIENT)
        if self.ca is not None:
            _authorities(context, self.ca)
        else:
            context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        if self.certificate is not None:
            self._own(context, self.certificate)
        return context

    def fingerprint(self) -> bytes:
        """What a daemon signs with its token's proof: the certificate that its clients see (DER)."""
        assert self.certificate is not None
        with open(self.certificate, encoding="ascii", errors="replace") as file:
            found = _CERTIFICATE.search(file.read())
        if not found:
            raise SmbError(f"TLS certificate {self.certificate}: no PEM certificate in it")
        return ssl.PEM_cert_to_DER_cert(found[0])

    def _own(self, context: ssl.SSLContext, certificate: Path) -> None:
        key = self.key if self.key is not None else certificate
        _readable("certificate", certificate)
        _readable("key", key)
        if os.stat(key).st_mode & stat.S_IROTH:
            log.warning("TLS key %s can be read by everybody (mode 0600 is enough)", key)
        try:
            context.load_cert_chain(certificate, key, _no_passphrase(key))
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise SmbError(f"TLS key {key} does not belong to certificate {certificate}") from error
            raise SmbError(
                f"TLS certificate {certificate} with key {key}: no PEM of both: {error}"
            ) from error


def from_environment() -> Tls | None:
    """What $SMB_TLS_CA, $SMB_TLS_CERT and $SMB_TLS_KEY name; None when none of them is set."""
    found = {name: os.environ.get(variable) or None for name, variable in VARIABLES.items()}
    return Tls(**found) if any(found.values()) else None


def binding(sock: socket.socket) -> bytes:
    """At a client: the certificate that the daemon showed (DER); b"" without TLS."""
    return (sock.getpeercert(True) or b"") if isinstance(sock, ssl.SSLSocket) else b""


def subject(sock: socket.socket) -> str:
    """At a daemon: whom the client's certificate names; "" when it showed none."""
    shown: Any = sock.getpeercert() if isinstance(sock, ssl.SSLSocket) else None
    names = [
        value for part in (shown or {}).get("subject", ()) for name, value in part if name == "commonName"
    ]
    return str(names[0]) if names else ""


def wrap_client(sock: socket.socket, host: str, tls: Tls, timeout: float) -> ssl.SSLSocket:
    """Shake hands with the daemon at ``host`` in ``timeout`` seconds. TransportError: ``sock`` is closed."""
    context = tls.client()
    sock.settimeout(timeout)
    try:
        return context.wrap_socket(sock, server_hostname=host)
    except OSError as error:
        sock.close()
        raise TransportError(f"TLS with {host}: {why(error)}") from error


def why(error: OSError) -> str:
    """The error in words, with a hint where one cause is usual."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{error.verify_message} (is the ca file the one that signed the daemon's certificate?)"
    if not isinstance(error, ssl.SSLError):
        return str(error)
    hints = {
        "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the daemon asks for a client certificate",
        "SSLV3_ALERT_HANDSHAKE_FAILURE": "the daemon refused (does it ask for a client certificate?)",
        "TLSV1_ALERT_UNKNOWN_CA": "the other end does not know who signed our certificate",
        "WRONG_VERSION_NUMBER": "the other end does not speak TLS",
        "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the client showed no certificate",
        "UNSUPPORTED_PROTOCOL": "the other end speaks a TLS older than 1.2",
    }
    return hints.get(error.reason or "", str(error))


def _context(purpose: int) -> ssl.SSLContext:
    context = ssl.SSLContext(purpose)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    return context


def _readable(what: str, path: Path) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise SmbError(f"TLS {what} {path}: {error.strerror}") from error


def _authorities(context: ssl.SSLContext, path: Path) -> None:
    _readable("ca", path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise SmbError(f"TLS ca {path}: no PEM certificate in it") from error
    if not context.cert_store_stats()["x509"]:
        raise SmbError(f"TLS ca {path}: no certificate in it")


def _no_passphrase(key: Path) -> Callable[[], NoReturn]:
    """Instead of a question on the terminal that a daemon would wait at for ever."""

    def refuse() -> NoReturn:
        raise SmbError(f"TLS key {key} has a passphrase, which nobody is here to enter")

    return refuse
