"""The socket of a server."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import resource
import socket
import stat
import struct
import sys
from pathlib import Path

from bertblocks.serve.settings import ServeSettings

#: Connections that the kernel keeps until the server accepts them.
BACKLOG = 2048
#: Files that a server has open apart from its connections.
OTHER_FILES = 256
#: Linux's socket option that attaches a filter of packets; Python's socket module lacks its name.
SO_ATTACH_FILTER = 26
#: The filter in classic BPF, as (code, jump if true, jump if false, value) per instruction.
DROP_REQUESTS_TO_CONNECT = (
    (0x30, 0, 0, 13),  # load the byte with the flags of the TCP header
    (0x45, 0, 1, 0x02),  # if SYN is not set, skip an instruction
    (0x06, 0, 0, 0),  # drop the packet
    (0x06, 0, 0, 0xFFFFFFFF),  # keep all of it
)


def listen(settings: ServeSettings) -> socket.socket:
    """Opens the socket; a port or file that is taken is an OSError of one sentence."""
    if settings.uds is not None:
        return _listen_on_file(settings.uds)
    host, port = settings.host, settings.port
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except socket.gaierror as error:
        raise OSError(f"host is {host!r}, which is not an address of this machine: {error.strerror}.") from None
    except OSError as error:
        reasons = {
            errno.EADDRINUSE: f"Port {port} of {host} is in use; choose another with --port.",
            errno.EACCES: f"Port {port} requires privileges; choose one above 1023 with --port.",
            errno.EADDRNOTAVAIL: f"host is {host!r}, which is not an address of this machine.",
        }
        raise OSError(reasons.get(error.errno or 0, f"{host}:{port} cannot be used: {error.strerror}.")) from None


def _listen_on_file(path: Path) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(f"{path} is a file, not a socket; choose another path with --uds.")
        if _is_answered(path):
            raise OSError(f"{path} is in use by another server; choose another path with --uds.")
        path.unlink()  # a server that was killed left it
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise OSError(f"{path} cannot be made: {error.strerror or error}.") from None
    listener.listen(BACKLOG)
    return listener


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def allow_connections(count: int) -> None:
    """Raises the number of files that this process may open, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def stop_connections(listener: socket.socket) -> None:
    """Lets nobody new connect; connections that the kernel has begun to accept can still be taken.

    Without it, closing the listener resets each connection that arrives after the last `accept`. A client whose
    request for a TCP connection is dropped asks again after a second, and then finds nobody who listens.
    """
    if listener.family == socket.AF_UNIX:
        listener.shutdown(socket.SHUT_RD)
    elif sys.platform == "linux":
        code = b"".join(struct.pack("=HBBI", *instruction) for instruction in DROP_REQUESTS_TO_CONNECT)
        buffer = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("@HP", len(DROP_REQUESTS_TO_CONNECT), ctypes.addressof(buffer))
        with contextlib.suppress(OSError):  # a sandbox may lack the option
            listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
