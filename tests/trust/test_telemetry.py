"""onnxruntime sends nothing and keeps no identifier: neither at import nor with a session."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..test_layers import ORDER, imported, sources

ORT = "accel.lowering.onnx.ort"
SESSION = """
from onnx import TensorProto, helper
x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1]) for n in "xy")
graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
"""


def left_at_home(importing: str, home: Path) -> list[str]:
    """The files that a process leaves in an empty home; without the variables of a CI, where nothing is sent."""
    kept = ("PATH", "PYTHONPATH", "SYSTEMROOT")
    env = {name: os.environ[name] for name in kept if name in os.environ} | {"HOME": str(home)}
    subprocess.run([sys.executable, "-c", importing + SESSION], env=env, check=True, timeout=120)
    return [path.name for path in home.rglob("*") if path.is_file()]


def test_nothing_is_left_behind(tmp_path):
    assert left_at_home(f"from {ORT} import ort", tmp_path) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what was seen there")
def test_onnxruntime_alone_would(tmp_path):
    """The test above can fail; and its own call, which one finds first, is not enough."""
    call = "import onnxruntime as ort; ort.disable_telemetry_events()"
    assert "deviceid" in left_at_home(call, tmp_path)


def test_it_is_imported_nowhere_else():
    found = [
        path.name
        for path in sources(*ORDER)
        if any(
            name.split(".")[0] == "onnxruntime" for name in imported(ast.parse(path.read_text()))
        )
    ]
    assert found == ["ort.py"]
