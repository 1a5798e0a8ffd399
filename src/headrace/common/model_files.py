"""Finds the files of a model: a path, `demo`, or an id at a model hub. No torch here.

/data/llama, ./model.gguf       a directory or file
demo                            the demo model, fetched once
org/name                        a repository at the hub (HF_ENDPOINT, HF_TOKEN), safetensors or its only GGUF file
org/name/file.gguf              one file of such a repository
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from headrace.common.demo_model import fetch_demo_model
from headrace.common.errors import StartupError

DEMO = "demo"
_HUB_ID = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./-]+\.gguf))?")
_TEXT_FILES = ("*.json", "*.jinja", "tokenizer.model")


class Wanted(Enum):
    """What the caller is going to read. Weights come with the tokenizer."""

    WEIGHTS = "weights"
    TOKENIZER = "tokenizer"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies on this machine.

    `path` is a GGUF file or a directory in Hugging Face's layout; `name` is what the model is called by default.
    """

    path: Path
    name: str


def resolve_model(model: str, revision: str | None = None, wanted: Wanted = Wanted.WEIGHTS) -> ModelFiles:
    """The files that `model` names, fetched first if need be; StartupError with one clear line if there are none."""
    if problem := revision_problem(model, revision):
        raise StartupError(problem)
    name = default_model_name(model)
    if model == DEMO:
        return ModelFiles(fetch_demo_model(), name)
    path = Path(model).expanduser()
    if model and path.exists():
        return ModelFiles(_checked(path, wanted), name)
    match = _HUB_ID.fullmatch(model)
    if _looks_like_path(model) or match is None:
        hint = "" if _looks_like_path(model) else f"; hub ids are org/name, the demo is `{DEMO}`"
        raise StartupError(f"model {model}: no such file or directory{hint}")
    return ModelFiles(_from_hub(match["repository"], match["file"], revision, wanted), name)


def default_model_name(model: str) -> str:
    """What a model is called unless it is given a name: itself, or the last part of a path, without .gguf."""
    path = Path(model).expanduser()
    if model in ("", DEMO) or not path.exists():
        return model
    return path.stem if path.is_file() else path.resolve().name


def revision_problem(model: str | None, revision: str | None) -> str | None:
    """What is wrong with giving this revision to this model, or None."""
    if revision is None:
        return None
    if model is None or model == DEMO or _looks_like_path(model) or Path(model).exists():
        return f"revision {revision} belongs to a hub id such as org/name; the model is {model}"
    return None


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) or (model.endswith(".gguf") and model.count("/") < 2)


def _checked(path: Path, wanted: Wanted) -> Path:
    """The path to load from: the file, the directory, or the only GGUF file in the directory."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise StartupError(f"model {path}: is a file, but not a .gguf file")
        return path
    needed = "config.json" if wanted is Wanted.WEIGHTS else "tokenizer.json"
    if (path / needed).is_file():
        if wanted is Wanted.WEIGHTS and not any(path.glob("*.safetensors")):
            raise StartupError(f"model {path}: has no .safetensors files")
        return path
    files = _whole_gguf_files(entry.name for entry in path.glob("*.gguf"))
    if not files:
        raise StartupError(f"model {path}: has neither {needed} nor a .gguf file")
    if len(files) > 1:
        raise StartupError(f"model {path}: has several .gguf files, name one of them: {', '.join(files)}")
    return path / files[0]


def _from_hub(repository: str, file: str | None, revision: str | None, wanted: Wanted) -> Path:
    if file is not None:
        return _download(repository, revision, [file]) / file
    patterns = [*_TEXT_FILES, *(["*.safetensors"] if wanted is Wanted.WEIGHTS else [])]
    snapshot = _download(repository, revision, patterns)
    needed = "*.safetensors" if wanted is Wanted.WEIGHTS else "tokenizer.json"
    if not any(snapshot.glob(needed)):
        files = _gguf_files_at_hub(repository, revision, snapshot)
        if not files:
            raise StartupError(f"model {repository}: the hub has neither {needed} nor a .gguf file of it")
        if len(files) > 1:
            raise StartupError(
                f"model {repository}: has several .gguf files, name one of them: "
                + ", ".join(f"{repository}/{name}" for name in files)
            )
        snapshot = _download(repository, revision, files)
    return _checked(snapshot, wanted)


def _download(repository: str, revision: str | None, patterns: list[str]) -> Path:
    """The snapshot folder in the hub's own cache, holding the files that match; whole files are not fetched again."""
    # Files of other formats and parts of the same weights in subfolders and `consolidated*` files stay away.
    ignored = ["consolidated*"] if any("/" in pattern for pattern in patterns) else ["*/*", "consolidated*"]
    from huggingface_hub import snapshot_download

    with _hub_errors_as_one_line(repository, revision):
        folder = snapshot_download(
            repository, revision=revision, allow_patterns=patterns, ignore_patterns=ignored, endpoint=_endpoint()
        )
    path = Path(str(folder))
    for pattern in patterns:
        if pattern.endswith(".gguf") and not (path / pattern).is_file():
            raise StartupError(f"model {repository}/{pattern}: the hub has no such file")
    return path


def _gguf_files_at_hub(repository: str, revision: str | None, snapshot: Path) -> list[str]:
    cached = _whole_gguf_files(entry.name for entry in snapshot.glob("*.gguf"))
    if cached:  # the only one, fetched earlier: works without the hub
        return cached
    from huggingface_hub import HfApi

    with _hub_errors_as_one_line(repository, revision):
        names = HfApi(endpoint=_endpoint()).list_repo_files(repository, revision=revision)
    return _whole_gguf_files(name for name in names if "/" not in name)


def _whole_gguf_files(names: Iterable[str]) -> list[str]:
    """Sorted names of GGUF files that are models by themselves, not image projectors."""
    return sorted(name for name in names if name.endswith(".gguf") and not name.startswith("mmproj"))


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


@contextmanager
def _hub_errors_as_one_line(repository: str, revision: str | None) -> Iterator[None]:
    from huggingface_hub import errors

    hub = _endpoint() or "https://huggingface.co"
    try:
        yield
    except errors.GatedRepoError:
        reason = "access is restricted: accept its terms at the hub and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = f"is neither a path here nor a repository at {hub} (a private one needs HF_TOKEN)"
    except errors.RevisionNotFoundError:
        reason = f"the hub {hub} has no such revision"
    except errors.LocalEntryNotFoundError:
        reason = f"no such path here, not in the hub's cache, and the hub {hub} is out of reach"
    except Exception as error:  # the client's versions differ in the HTTP library, and so in its errors
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    else:
        return
    what = f"model {repository}" + (f" at revision {revision}" if revision else "")
    raise StartupError(f"{what}: {reason}")
