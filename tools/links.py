"""Make build/links/accel, one link per package, so that mypy and pyright see the package as installed."""

import shutil
import tomllib
from pathlib import Path


def link(root: Path) -> None:
    """Make the links of a checkout; those that are stale or lead into another checkout are made anew."""
    config = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    folders = config["tool"]["setuptools"]["package-dir"]
    top = root / "build" / "links" / "accel"
    top.mkdir(parents=True, exist_ok=True)
    wanted = {
        path.name: path
        for path in (root / folders["accel"]).iterdir()
        if path.name != "__pycache__"
    }
    for package, folder in folders.items():
        if "." in package:
            wanted[package.split(".", 1)[1]] = root / folder
    shutil.rmtree(
        top / "__pycache__", ignore_errors=True
    )  # Python's own, of a run through the links
    for old in top.iterdir():
        if not old.is_symlink() or old.readlink() != wanted.get(old.name):
            old.unlink()
    for name, target in wanted.items():
        if not (top / name).is_symlink():
            (top / name).symlink_to(target, target_is_directory=target.is_dir())


if __name__ == "__main__":
    link(Path(__file__).resolve().parents[1])
