"""Certificates of a worker, from a directory laid out as a Kubernetes TLS secret."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from m3stack.errors import StartupError

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"


def server_credentials(directory: Path) -> grpc.ServerCredentials:
    """What a worker shows to its clients; with `ca.crt` there, they must show a certificate too.

    Raises:
        StartupError: names the file that cannot be read or holds no PEM, or the pair that does
            not fit; never what they hold.
    """
    pair = (_pem(directory / KEY), _pem(directory / CERTIFICATE))
    _check_pair(directory)
    authority = directory / AUTHORITY
    if not authority.exists():
        return grpc.ssl_server_credentials([pair])
    return grpc.ssl_server_credentials(
        [pair], root_certificates=_pem(authority), require_client_auth=True
    )


def channel_credentials(directory: Path) -> grpc.ChannelCredentials:
    """What a client asks of a worker, and shows it if `tls.crt` and `tls.key` are there.

    Raises:
        StartupError: as `server_credentials`.
    """
    authority = _pem(directory / AUTHORITY)
    if not (directory / CERTIFICATE).exists():
        return grpc.ssl_channel_credentials(authority)
    return grpc.ssl_channel_credentials(
        authority, _pem(directory / KEY), _pem(directory / CERTIFICATE)
    )


def peer_credentials(directory: Path) -> grpc.ChannelCredentials:
    """What a worker asks of other workers, and shows them; without `ca.crt`, public roots."""
    authority = directory / AUTHORITY
    return grpc.ssl_channel_credentials(
        _pem(authority) if authority.exists() else None,
        _pem(directory / KEY),
        _pem(directory / CERTIFICATE),
    )


def _check_pair(directory: Path) -> None:
    """gRPC itself would only say that it cannot listen."""
    certificate, key = directory / CERTIFICATE, directory / KEY
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # a key under a password cannot be used; nobody is there to be asked for it
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        reason = error.reason or "they cannot be read as such"
        raise StartupError(
            f"tls_dir: {certificate} and {key} are no certificate and its key: {reason}"
        ) from None


def _pem(path: Path) -> bytes:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise StartupError(f"tls_dir: {path} cannot be read: {error.strerror}") from error
    if b"-----BEGIN " not in text:
        raise StartupError(f"tls_dir: {path} holds no PEM")
    return text
