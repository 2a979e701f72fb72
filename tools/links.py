"""Make build/links/accel, one link per package, so that mypy and pyright see the package as installed."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = config["tool"]["setuptools"]["package-dir"]
    top = ROOT / "build" / "links" / "accel"
    top.mkdir(parents=True, exist_ok=True)
    wanted = {path.name: path for path in (ROOT / folders["accel"]).iterdir()}
    for package, folder in folders.items():
        if "." in package:
            wanted[package.split(".", 1)[1]] = ROOT / folder
    for old in top.iterdir():
        if old.name not in wanted:
            old.unlink()
    for name, target in wanted.items():
        link = top / name
        if not link.is_symlink():
            link.symlink_to(target, target_is_directory=target.is_dir())


if __name__ == "__main__":
    main()
