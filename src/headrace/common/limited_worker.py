"""A child process that answers one message at a time under limits of processor time and memory, and may die of them.

For work that runs on what users send and that no thread can interrupt. The kernel ends the process when an answer takes
more processor time than allowed; a crash of a native library ends the child and not the service.

The child is `python -m MODULE`, whose main calls `serve`. Its standard input is a socket. Both ways go u32 lengths
(big-endian) and that many bytes: first the limits, then the module's own set-up, then one message and one answer after
the other.
"""

import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

_LENGTH = struct.Struct("!I")
_CHILD_STACK_BYTES = 1 << 20

Handler = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What one answer may use."""

    cpu_seconds: float = 1.0
    wall_seconds: float = 10.0  # for a machine that gives the child no processor time
    memory_bytes: int = 128 << 20  # address space beyond what the set-up took


class WorkerOverrun(Exception):
    """The message was too much for the child, which is no more; says why, as the end of a sentence about the work."""


class WorkerLost(Exception):
    """The child is no more, and the message is not to blame: it got no processor time, or somebody ended it."""


class LimitedWorker:
    """The parent's end. `exchange` must not be called from two threads at once."""

    def __init__(self, module: str, set_up: bytes, limits: WorkerLimits) -> None:
        """Starts the child. Raises OSError if the machine cannot; a bad set-up shows at the first exchange."""
        self._limits = limits
        self.dead = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module], stdin=theirs.fileno(), stdout=subprocess.DEVNULL
            )
        # Also when nobody calls close: the child must not outlive its parent's interest.
        self._finalizer = weakref.finalize(self, _end, self._process, self._socket)
        self._unsent: tuple[bytes, ...] = (json.dumps(asdict(limits)).encode(), set_up)

    def exchange(self, message: bytes) -> bytes:
        """Sends a message and returns the answer. Raises WorkerOverrun or WorkerLost."""
        messages, self._unsent = (*self._unsent, message), ()
        deadline = time.monotonic() + self._limits.wall_seconds
        try:
            self._socket.settimeout(self._limits.wall_seconds)
            for data in messages:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
            (size,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
            return self._read(size, deadline)
        except TimeoutError:
            self.close()
            raise WorkerLost(f"took more than {self._limits.wall_seconds:g} s") from None
        except OSError:  # the other end is closed: the process has ended, or is about to
            raise self._why_it_ended() from None

    def close(self) -> None:
        """Ends the child at once; for any thread."""
        self.dead = True
        self._finalizer()

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            piece = self._socket.recv(min(size - len(data), 1 << 20))
            if not piece:
                raise ConnectionResetError
            data += piece
        return bytes(data)

    def _why_it_ended(self) -> WorkerOverrun | WorkerLost:
        try:
            code = self._process.wait(self._limits.wall_seconds)
        except subprocess.TimeoutExpired:
            code = None
        self.close()
        if code == -signal.SIGPROF:
            return WorkerOverrun(f"took more than {self._limits.cpu_seconds:g} s of processor time")
        if code in (-signal.SIGSEGV, -signal.SIGBUS):
            return WorkerOverrun("needed more stack than there is")
        if code == -signal.SIGABRT:
            return WorkerOverrun(f"needed more than {self._limits.memory_bytes >> 20} MiB of memory")
        return WorkerLost(f"lost its process (exit code {code})")


def serve(set_up: Callable[[bytes], Handler]) -> None:
    """The child's main: sets up with the parent's bytes, then answers until the parent closes the socket.

    An exception of the handler ends the child.
    """
    # A Ctrl-C or a SIGTERM to the whole process group is the parent's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A smaller stack than any thread of the service has: what recurses too deeply dies here and not there.
    threading.stack_size(_CHILD_STACK_BYTES)
    with socket.socket(fileno=0) as connection:
        thread = threading.Thread(target=_answer_all, args=(connection, set_up))
        thread.start()
        thread.join()


def _answer_all(connection: socket.socket, set_up: Callable[[bytes], Handler]) -> None:
    first = _receive(connection)
    second = _receive(connection)
    if first is None or second is None:
        return
    limits = WorkerLimits(**json.loads(first))
    handler = set_up(second)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + limits.memory_bytes,) * 2)
    while (message := _receive(connection)) is not None:
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)  # its default action is to end this process
        try:
            answer = handler(message)
        except MemoryError:
            os.abort()  # as a native library does that gets no memory
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(_LENGTH.pack(len(answer)) + answer)


def _address_space() -> int:
    """Bytes that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _receive(connection: socket.socket) -> bytes | None:
    """The next message, or None when the parent is gone."""
    size, wanted, data = None, _LENGTH.size, bytearray()
    while True:
        while len(data) < wanted:
            piece = connection.recv(min(wanted - len(data), 1 << 20))
            if not piece:
                return None
            data += piece
        if size is not None:
            return bytes(data)
        (size,) = _LENGTH.unpack(data)
        wanted, data = size, bytearray()


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()
