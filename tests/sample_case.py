"""What the test file of a sampler, `tests/runtime/sample/test_METHOD.py`, holds for laws: OPTIONS, and
`probabilities(p, o)`, the published form of what a method with the options `o` makes of probabilities p [V].
"""

from types import ModuleType

from accel.ir.axis import Axis

from .own_case import file_of

AXIS = Axis("sample", "accel.runtime.sample")


def own(name: str) -> ModuleType:
    """The test file of a method."""
    return file_of("runtime.sample", name, "OPTIONS", "probabilities")
