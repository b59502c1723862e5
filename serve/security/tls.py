"""TLS for every protocol, with one server certificate; clients need certificates if a CA for clients is given."""

import ssl
from pathlib import Path

import grpc

from apt_jax.errors import ConfigError

CERT_FLAG, KEY_FLAG, CLIENT_CA_FLAG = "--tls-cert", "--tls-key", "--tls-client-ca"


class Tls:
    """Certificate and key, read when this object is created; TLS 1.2 or newer.

    Args:
        cert: PEM file of the certificate and its chain.
        key: PEM file of its key, without a passphrase.
        client_ca: PEM file of CAs, one of which must have issued a client's certificate; None: clients need no
            certificate.

    Raises:
        ConfigError: a file cannot be read or has the wrong contents; the message names the flag.
    """

    def __init__(self, cert: str, key: str, client_ca: str | None = None) -> None:
        self._files = cert, key, client_ca
        self.context = _context(cert, key, client_ca)
        """SSL context for servers that use the `ssl` module."""
        self._pem = _pem(*self._files)

    @property
    def asks_clients(self) -> bool:
        """True if clients must present a certificate."""
        return self._files[2] is not None

    def reload(self) -> None:
        """Reload the certificate and key files for new connections; the CAs of clients are reloaded only for gRPC.

        Raises:
            ConfigError: see the class; the old certificate and key stay in use.
        """
        cert, key, client_ca = self._files
        _context(cert, key, client_ca)  # checks that certificate and key match
        self._pem = _pem(*self._files)
        self.context.load_cert_chain(cert, key, password="")

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for gRPC servers."""
        return grpc.dynamic_ssl_server_credentials(
            self._grpc_configuration(),
            self._grpc_configuration,
            require_client_authentication=self.asks_clients,
        )

    def _grpc_configuration(self) -> grpc.ServerCertificateConfiguration:
        """Return the configuration for a handshake; gRPC calls this for each handshake."""
        cert, key, client_ca = self._pem
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=client_ca)


def _context(cert: str, key: str, client_ca: str | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for path, flag in ((cert, CERT_FLAG), (key, KEY_FLAG), (client_ca, CLIENT_CA_FLAG)):
        if path is not None:
            _read(path, flag)
    try:
        context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, OSError):
        raise ConfigError(
            f"{cert} and {key}: not a PEM certificate and its key without passphrase ({CERT_FLAG}, {KEY_FLAG})"
        ) from None
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except (ssl.SSLError, OSError):
            raise ConfigError(f"{client_ca}: holds no PEM certificate ({CLIENT_CA_FLAG})") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _pem(cert: str, key: str, client_ca: str | None) -> tuple[bytes, bytes, bytes | None]:
    ca = None if client_ca is None else _read(client_ca, CLIENT_CA_FLAG)
    return _read(cert, CERT_FLAG), _read(key, KEY_FLAG), ca


def _read(path: str, flag: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}) ({flag})") from None
