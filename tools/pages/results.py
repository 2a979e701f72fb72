"""Where measurements of the bundled models are kept until a page is made of them: a folder for each set of weights."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = Path(str(files("accel.reference")))


@cache
def weights(reference: Path = REFERENCE) -> str:
    """A short digest of the bundled models' weights: the model, and those of the folders in it."""
    found = sha256()
    for path in sorted(reference.rglob("model.safetensors")):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def folder(name: str, *models: Path) -> Path:
    """Of the results of a page, on the weights that are there now; or of these models, as their files are now."""
    if not models:
        return ROOT / "build" / name / weights()
    found = sha256()
    for model in models:
        for path in sorted(model.rglob("*")) if model.is_dir() else [model]:
            found.update(
                f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}\n".encode()
            )
    return ROOT / "build" / name / f"{models[0].stem}-{found.hexdigest()[:12]}"
