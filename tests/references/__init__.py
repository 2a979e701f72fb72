"""What laws compare methods with: `references/AXIS/METHOD.py`, a method's published form written down anew."""

import importlib
from types import ModuleType

import pytest


def reference(axis: str, name: str) -> ModuleType:
    """The reference of a method, whose names the law of its axis says; the law fails where there is none."""
    module = f"{__package__}.{axis}.{name.replace('-', '_')}"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        path = f"tests/references/{axis}/{name.replace('-', '_')}.py"
        pytest.fail(f"no {path}: write what {axis} = {name} is compared with, as its neighbours do")
