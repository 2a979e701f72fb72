"""What laws compare methods with stands in the methods' own test files."""

import importlib
from types import ModuleType

import pytest


def file_of(package: str, name: str, *needed: str) -> ModuleType:
    """The test file of a method in `tests/PACKAGE`. Fails where it is not there, or lacks a name that is `needed`."""
    module = f"{__package__}.{package}.test_{name.replace('-', '_')}"
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        found = None
    if not all(hasattr(found, one) for one in needed):
        pytest.fail(f"{module} lacks {' or '.join(needed)}: write what {name} is compared with")
    return found
