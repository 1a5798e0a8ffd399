"""A core and a gateway as two processes on loopback, for scripts that need a running pair."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class PairError(Exception):
    """The pair did not start or did not stop as it should; it has said why on stderr."""


@contextmanager
def running_pair(*flags: str) -> Iterator[str]:
    """Runs `headrace up` with these flags on free ports; yields the gateway's address once both serve.

    Progress bars and logs go to stderr. PairError if the pair ends before it is ready, or not cleanly.
    """
    command = [sys.executable, "-m", "headrace.cli.main", "up", "--port", "0", "--core-port", "0", *flags]
    # In a process group of its own, so that Ctrl-C reaches it once: from us.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            yield _gateway_address(process)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
    if process.returncode != 0:
        raise PairError(f"core and gateway ended with exit code {process.returncode}")


def _gateway_address(process: "subprocess.Popen[str]") -> str:
    """The address in the line `ready gateway=HOST:PORT ...`."""
    if process.stdout is None:
        raise RuntimeError("the pair's stdout is not a pipe")
    for line in process.stdout:
        words = dict(word.partition("=")[::2] for word in line.split())
        if "ready" in words:
            return words["gateway"]
    raise PairError("core and gateway did not start")
