"""Listening sockets, the TLS certificate, and the uvicorn server."""

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
NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # e.g. on a machine without IPv6
SEND_BUFFER = 64 * 1024  # bytes of kernel buffer per connection; Linux doubles it


def listen(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets, one for each address of `host`; the one for `::` accepts IPv4 too.
    Port 0: any free port, the same for all. Raises ConfigError."""
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
    # Inherited by connections. asyncio sets it only if the socket's protocol is given, which it is
    # not here. Without it a chunk waits for the ACK of the previous one, up to 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Inherited too. By default the kernel would buffer megabytes for a client that does not read.
    # With a small buffer, unsent output is merged here: less memory, and fewer pieces.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    return listener


def cut_connections(http: uvicorn.Server) -> None:
    """Cut all open connections: their clients do not read. Tasks end as if the client left."""
    for connection in list(http.server_state.connections):
        assert isinstance(connection, Connection)
        connection.cut()


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS context; None for plain HTTP. Raises ConfigError."""
    if config.tls_certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_certificate(context, config)
    return context


def load_certificate(context: ssl.SSLContext, config: ServerConfig) -> None:
    """Load the certificate for new connections. Raises ConfigError and then keeps the old one."""
    assert config.tls_certificate is not None
    paths = f"{config.tls_certificate} and {config.tls_key}"
    for into in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):  # try it first
        try:
            # Without `password`, an encrypted key would prompt on the terminal.
            into.load_cert_chain(config.tls_certificate, config.tls_key, password=lambda: b"")
        except (OSError, ssl.SSLError) as error:
            reason = error.strerror or "they are no certificate with its key, or it has a password"
            raise ConfigError(f"cannot use the certificate {paths}: {reason}") from None


def http_server(app: Any, config: ServerConfig, tls: ssl.SSLContext | None) -> uvicorn.Server:
    """Return a uvicorn server without signal handlers: the Service decides when it stops."""
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
            timeout_graceful_shutdown=None,  # the Service cuts what does not end
        )
    )
    server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]
    return server
