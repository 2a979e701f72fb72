"""A model's folder by its name: a path, or the id of a repository in the Hugging Face cache.

The cache is the user's own (HF_HUB_CACHE, HF_HOME), read by huggingface_hub. Nothing is downloaded unless asked.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from accel.ir.errors import CaptureError

_FETCHED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]
_GGUF = ".gguf"
_LEFT = [  # other forms of the same weights; templates lie in a folder
    *(f"*/{files}" for files in _FETCHED if files != "*.jinja"),
    "consolidated*",
]


def model_folder(name_or_path: str | Path, download: bool = False) -> Path:
    """The folder (or file) at a path, or else the snapshot of the repository of that id ("org/name").

    download: let huggingface_hub fetch what the cache lacks of it.

    Raises:
        CaptureError: it is neither, with the near names of cached repositories; or it cannot be downloaded.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import validate_repo_id

    path, name = Path(name_or_path), str(name_or_path)
    if path.exists():
        return path
    near = near_beside(path)
    if near is not None and (not download or near.suffix == _GGUF):
        raise CaptureError(f"{path} does not exist; did you mean {near}?")
    try:
        validate_repo_id(name)
        if path.suffix == _GGUF:
            raise HFValidationError
    except HFValidationError:
        raise CaptureError(
            f"{path} does not exist; give a GGUF file or a model directory (with config.json and *.safetensors)"
        ) from None
    wanted = {"allow_patterns": _FETCHED, "ignore_patterns": _LEFT}
    if download:
        try:
            return Path(snapshot_download(name, **wanted))
        except Exception as error:  # of its HTTP library too
            raise CaptureError(
                f"{name} cannot be downloaded ({type(error).__name__}: {_first(error)}); check the name and the "
                f"network{_near(name)}"
            ) from error
    folder: Path | None
    try:
        folder = Path(snapshot_download(name, local_files_only=True, **wanted))
    except LocalEntryNotFoundError:
        if name not in cached_models():
            raise CaptureError(
                f"{name} does not exist: it is neither a folder nor a repository in the Hugging Face cache"
                f"{_near(name)}; give a GGUF file or a model directory (with config.json and *.safetensors), or "
                "download the repository with download=True"
            ) from None
        folder = None
    from accel.compiler.load.shards import INDEX, SINGLE  # which needs torch

    if folder is None or not any((folder / file).is_file() for file in (SINGLE, INDEX)):
        raise CaptureError(
            f"{name} lies in the Hugging Face cache in part only; fetch the rest with download=True"
        )
    return folder


def near_beside(path: Path, also: str = "config.json") -> Path | None:
    """What has a near name in the folder of a path that does not exist, and is a GGUF file, a model directory or a
    folder that holds the file `also`.
    """
    marks = ("config.json", also)
    found = path.parent.iterdir() if path.parent.is_dir() else ()
    names = [
        p.name
        for p in found
        if (p.suffix == _GGUF and p.is_file()) or any((p / mark).is_file() for mark in marks)
    ]
    near = difflib.get_close_matches(path.name, names, n=1)
    return path.parent / near[0] if near else None


def cached_models() -> list[str]:
    """The ids of the repositories in the cache."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
        return sorted(repo.repo_id for repo in repos if repo.repo_type == "model")
    except CacheNotFound:
        return []


def _near(name: str) -> str:
    """The cached repositories of near names, as part of a sentence."""
    known = {repo.lower(): repo for repo in cached_models()}
    last = {repo.rpartition("/")[2]: known[repo] for repo in known}
    low = name.lower()
    near = [known[n] for n in difflib.get_close_matches(low, known, n=3)]
    near += [last[n] for n in difflib.get_close_matches(low.rpartition("/")[2], last, n=3)]
    return f" (near names in the cache: {', '.join(dict.fromkeys(near))})" if near else ""


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
