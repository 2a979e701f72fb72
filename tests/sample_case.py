"""What the test file of a sampler, `tests/runtime/sample/test_METHOD.py`, holds for laws: OPTIONS, and
`probabilities(p, o)`, the published form of what a method with the options `o` makes of probabilities p [V].
"""

import importlib
from types import ModuleType

import pytest

from accel.ir.axis import Axis

AXIS = Axis("sample", "accel.runtime.sample")


def own(name: str) -> ModuleType:
    """The test file of a method."""
    module = f"{__package__}.runtime.sample.test_{name.replace('-', '_')}"
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        found = None
    if not (hasattr(found, "OPTIONS") and hasattr(found, "probabilities")):
        pytest.fail(
            f"{module} lacks OPTIONS or probabilities(p, o): write what {name} is compared with"
        )
    return found
