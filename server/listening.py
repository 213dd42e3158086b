"""What listens: sockets, the certificate, and uvicorn on them."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from contextlib import nullcontext
from typing import Any

import uvicorn

from engine.errors import ConfigError
from server.config import ServerConfig
from server.connection import Connection

BACKLOG = 2048
NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # of a machine without IPv6, say
SEND_BUFFER = 64 * 1024  # bytes of the kernel for a connection; Linux takes it twice


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets: one for each address that the name has, and for `::` one that takes IPv4
    as well. Raises ConfigError."""
    listeners = list[socket.socket]()
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for address, family in {str(info[4][0]): info[0] for info in found}.items():
            try:
                listeners.append(_listener(address, family, port))
            except OSError as error:
                if error.errno not in NOT_HERE or len(found) == 1:
                    raise
            else:
                port = listeners[0].getsockname()[1]
    except OSError as error:
        for listener in listeners:
            listener.close()
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}; choose another with --host and --port"
        ) from None
    return listeners


def _listener(address: str, family: socket.AddressFamily, port: int) -> socket.socket:
    both = family == socket.AF_INET6 and address == "::" and socket.has_dualstack_ipv6()
    listener = socket.create_server(
        (address, port), family=family, backlog=BACKLOG, dualstack_ipv6=both
    )
    # Connections inherit it. asyncio sets it only where the socket names its protocol, which this
    # one does not; and without it a chunk waits for the ACK of the one before, up to 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # As well, and else the kernel would take megabytes for a client that does not read: what is
    # not sent yet is merged here, which keeps it small and gives it to the client in fewer pieces.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    return listener


def cut_connections(http: uvicorn.Server) -> None:
    """Of clients that do not read; their tasks end as when a client leaves."""
    for connection in list(http.server_state.connections):
        assert isinstance(connection, Connection)
        connection.cut()


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """None: plain HTTP. Raises ConfigError."""
    if config.tls_certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_certificate(context, config)
    return context


def load_certificate(context: ssl.SSLContext, config: ServerConfig) -> None:
    """For new connections. Raises ConfigError, and then those before stay."""
    assert config.tls_certificate is not None
    paths = f"{config.tls_certificate} and {config.tls_key}"
    for into in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):  # tried on another one first
        try:
            # A key with a password would have asked the terminal for it.
            into.load_cert_chain(config.tls_certificate, config.tls_key, password=lambda: b"")
        except (OSError, ssl.SSLError) as error:
            reason = error.strerror or "they are no certificate with its key, or it has a password"
            raise ConfigError(f"cannot use the certificate {paths}: {reason}") from None


def http_server(app: Any, config: ServerConfig, tls: ssl.SSLContext | None) -> uvicorn.Server:
    """uvicorn without its signal handlers: when it stops is the Service's decision."""
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=Connection,
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=bool(config.trusted_proxies),
            forwarded_allow_ips=config.trusted_proxies,
            ssl_context_factory=None if tls is None else lambda config, default: tls,
            server_header=False,
            ws="none",
            backlog=BACKLOG,
            timeout_keep_alive=config.keep_alive_seconds,
            timeout_graceful_shutdown=None,  # the Service cuts who does not end
        )
    )
    server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]
    return server
