"""The links that type checkers read: one per package, and never out of the checkout that they lie in."""

import shutil

import links
import pytest


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "one"
    for folder in ("api", "ir"):
        (root / folder).mkdir(parents=True)
    (root / "api" / "cli.py").touch()
    table = '"accel" = "api"\n"accel.ir" = "ir"\n'
    (root / "pyproject.toml").write_text(f"[tool.setuptools.package-dir]\n{table}")
    links.link(root)
    return root


def leading(root):
    top = root / "build" / "links" / "accel"
    return {path.name: path.resolve() for path in top.iterdir()}


def test_every_package_has_a_link(checkout):
    assert leading(checkout) == {"cli.py": checkout / "api" / "cli.py", "ir": checkout / "ir"}


def test_a_copy_links_into_itself(checkout):
    copy = checkout.with_name("two")
    shutil.copytree(checkout, copy, symlinks=True)
    assert (
        leading(copy)["ir"] == checkout / "ir"
    )  # as copied: what is written there would land in the other
    links.link(copy)
    assert leading(copy) == {"cli.py": copy / "api" / "cli.py", "ir": copy / "ir"}
    assert leading(checkout)["ir"] == checkout / "ir"


def test_a_link_to_what_is_gone_is_removed(checkout):
    (checkout / "api" / "cli.py").unlink()
    links.link(checkout)
    assert leading(checkout) == {"ir": checkout / "ir"}
