"""The search of slices: it measures real prompts, and what it prints is an option of the method."""

import pytest
import ranks

from accel.ir.axis import find_axes

from ..prefill_case import built


@pytest.mark.long
def test_it_prints_shares_that_the_method_takes(capsys):
    table = {"use": "kv-runahead", "ranks": 2, "least": 4}
    model = built("llama", "onnx", {"prefill.ranks": table})
    ranks.main([str(model.artifact.path), "--tokens", "12", "24", "--rounds", "1", "--grid", "1"])
    key, _, value = capsys.readouterr().out.strip().partition(" = ")
    shares = eval(value, {})
    assert key == "shares" and [row[0] for row in shares] == [12, 24]
    assert all(sum(row[1:]) == row[0] for row in shares)
    method = find_axes()["prefill.ranks"].build("kv-runahead", shares=shares)
    assert method.cuts(24, 0) == [shares[1][1], 24]
