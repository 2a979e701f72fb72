"""Where measurements of the bundled model are kept until a page is made of them: a folder for each set of weights."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = Path(str(files("accel.reference")))


@cache
def weights(reference: Path = REFERENCE) -> str:
    """A short digest of the bundled model's weights. Those of what lies beside it, which drafts or fills masks, say
    nothing of its rows.
    """
    return sha256((reference / "model.safetensors").read_bytes()).hexdigest()[:12]


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
