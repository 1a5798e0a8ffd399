"""Builds the images of both services, reports their sizes and checks that the gateway's holds no torch.

With a container engine that is `docker build`. Without one, buildah builds the same Dockerfiles as root, without
namespaces (`--isolation chroot`), over a stand-in for the base image: a Debian bookworm with its own Python 3.11, made
by mmdebstrap, since no image registry may be in reach. All that it keeps is in /var/cache/headrace-images.
The last line of output is a JSON object: the engine's command line and the images.

usage: images.py
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

from headrace.core_service.version import CORE_VERSION
from headrace.gateway.version import GATEWAY_VERSION

ROOT = Path(__file__).resolve().parent.parent
STATE = Path("/var/cache/headrace-images")
BASE_IMAGE = "docker.io/library/python:3.11-slim-bookworm"
BASE_PACKAGES = "ca-certificates,python3,python3-venv"
IMAGES = {"gateway": f"headrace-gateway:{GATEWAY_VERSION}", "core": f"headrace-core:{CORE_VERSION}"}
TOOLS = ("buildah", "mmdebstrap")
# Where pip looks for packages, by pip's own setting names; each is a build argument of the Dockerfiles.
PIP_PLACES = ("index-url", "extra-index-url", "find-links", "cert")
GATEWAY_IS_SLIM = (
    "import importlib.util as u, sys;"
    "sys.exit([m for m in ('torch', 'triton', 'headrace.core_service', 'headrace.kernels') if u.find_spec(m)] or 0)"
)
KERNELS_ARE_COMPILED = (
    "import headrace.core_service.version, sys; from headrace.kernels.best_kernels import best_kernels;"
    "sys.exit(None if best_kernels().name.startswith('cpp-') else 'the core image has no compiled kernels')"
)


class ImagesError(Exception):
    """The images cannot be built here, or are not what they should be; the message says why."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A program that builds images and runs commands in them."""

    command: list[str]  # with its global options
    is_docker: bool

    def run(self, *arguments: str, quiet: bool = False) -> str:
        """Runs one of the engine's commands; returns its output; ImagesError when it fails."""
        result = subprocess.run([*self.command, *arguments], cwd=ROOT, capture_output=True, text=True)
        if result.returncode != 0:
            tail = "\n".join((result.stdout + result.stderr).splitlines()[-25:])
            raise ImagesError(f"{self.command[0]} {arguments[0]} failed with exit code {result.returncode}:\n{tail}")
        if not quiet:
            print(result.stdout, end="")
        return result.stdout.strip()

    def run_in(self, image: str, *command: str) -> None:
        """Runs a command in a fresh container of an image; ImagesError when it fails."""
        if self.is_docker:
            self.run("run", "--rm", image, *command)
            return
        container = self.run("from", image, quiet=True)
        try:
            self.run("run", "--isolation", "chroot", container, "--", *command)
        finally:
            self.run("rm", container, quiet=True)


def pip_places() -> dict[str, list[str]]:
    """Where this environment's pip looks for packages, by setting name; variables win over files, as in pip itself."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    settings = dict(line.split("=", 1) for line in listing.splitlines())
    places = {}
    for name in PIP_PLACES:
        value = settings.get(f":env:.{name}") or settings.get(f"global.{name}")
        if value:
            places[name] = str(ast.literal_eval(value)).split()
    return places


def build_options(is_docker: bool) -> list[str]:
    """Build arguments that tell the Dockerfiles where pip finds packages; local folders are mounted, read-only.

    docker build mounts no folders: there only addresses are passed on.
    """
    options: list[str] = []
    for name, places in pip_places().items():
        local = [path for place in places if (path := urlparse(place).path) and urlparse(place).scheme in ("", "file")]
        if is_docker and local:
            print(f"images: pip's {name} is on this disk, which docker build does not see; it is left out")
            continue
        options += ["--build-arg", f"PIP_{name.replace('-', '_').upper()}={' '.join(places)}"]
        for path in local:
            # Packages in a local index may be links to files elsewhere in the same top folder.
            folder = Path(path).parent if name.endswith("index-url") else Path(path)
            options += ["--volume", f"{folder}:{folder}:ro"]
    return options


def find_engine() -> Engine:
    """Docker where its engine answers, else buildah; ImagesError with the reason where neither can work."""
    if shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True).returncode == 0:
        return Engine(["docker"], is_docker=True)
    if sys.platform != "linux" or os.geteuid() != 0:
        raise ImagesError("no container engine answers (docker info), and buildah in a chroot needs Linux and root")
    install_tools()
    STATE.mkdir(mode=0o700, exist_ok=True)
    storage = ["--root", str(STATE / "storage"), "--runroot", str(STATE / "run")]
    for driver in ("overlay", "vfs"):
        engine = Engine(["buildah", *storage, "--storage-driver", driver], is_docker=False)
        try:
            engine.run("images", quiet=True)
        except ImagesError as error:
            reason = error
        else:
            return engine
    raise reason


def install_tools() -> None:
    """Installs the tools that are missing, where apt-get can; ImagesError where they cannot be had."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise ImagesError(f"no container engine answers (docker info), and {' and '.join(missing)} is not installed")
    print(f"images: installing {' and '.join(missing)}", flush=True)
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        result = subprocess.run(["apt-get", "-qq", *command], env=environment, capture_output=True, text=True)
        if result.returncode != 0:
            raise ImagesError(f"apt-get {command[0]} failed:\n{result.stderr.strip()}")


def make_base_image(engine: Engine) -> None:
    """Makes the stand-in for the base image, unless it is there."""
    if engine.run("images", "--quiet", "--filter", f"reference={BASE_IMAGE}", quiet=True):
        return
    print(f"images: making a stand-in for {BASE_IMAGE}", flush=True)
    archive = STATE / "base.tar"
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", str(archive)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise ImagesError(f"mmdebstrap failed:\n{result.stderr.strip()}")
    container = engine.run("from", "scratch", quiet=True)
    try:
        engine.run("add", "--quiet", container, str(archive), "/", quiet=True)
        engine.run("commit", "--quiet", container, BASE_IMAGE, quiet=True)
    finally:
        engine.run("rm", container, quiet=True)
        archive.unlink()


def build(engine: Engine, side: str) -> None:
    """Builds one side's image; layers that did not change are taken from the cache."""
    print(f"images: building {IMAGES[side]}", flush=True)
    options = ["--file", f"deploy/{side}.Dockerfile", *build_options(engine.is_docker)]
    if not engine.is_docker:
        options += ["--isolation", "chroot", "--format", "docker", "--layers", "--pull=never"]
        # Named, so that it outlives the removal of unnamed images: it holds the installed packages.
        engine.run("build", *options, "--target", "build", "--tag", f"headrace-{side}-build", ".", quiet=True)
    engine.run("build", *options, "--tag", IMAGES[side], ".", quiet=True)


def main() -> int:
    """Builds, checks and reports; returns the exit code."""
    try:
        engine = find_engine()
        if not engine.is_docker:
            make_base_image(engine)
        for side in IMAGES:
            build(engine, side)
        if not engine.is_docker:
            engine.run("rmi", "--prune", quiet=True)
        engine.run_in(IMAGES["gateway"], "python", "-c", GATEWAY_IS_SLIM)
        engine.run_in(IMAGES["core"], "python", "-c", KERNELS_ARE_COMPILED)
        sizes = {side: engine.run("images", "--format", "{{.Size}}", name, quiet=True) for side, name in IMAGES.items()}
    except ImagesError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    for side, size in sizes.items():
        print(f"images: {IMAGES[side]} is {size}")
    print("images: the gateway's holds no torch, triton, core_service or kernels")
    print(json.dumps({"engine": engine.command, "is_docker": engine.is_docker, "images": IMAGES, "sizes": sizes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
