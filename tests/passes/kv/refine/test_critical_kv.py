"""CriticalKV: against NumPy, its projection out of the graph, and the equality with its base."""

import numpy as np
import pytest
import torch

from accel.ir.errors import PassError
from accel.passes.kv.inputs.output import Output
from accel.passes.kv.refine.critical_kv import projected

from ....kv_case import evicting, recipe
from ....kv_slots import B, G, R, build, choose, named, sets, slots


@pytest.mark.parametrize("share", [0.0, 0.5, 0.8])
def test_is_the_two_stages(share):
    method = build("refine", "critical-kv", share=share)
    for seed in range(3):
        x, score = slots(seed), build("score", "h2o", recent=3)
        values = named(x)
        found = sets(choose(x, 7, score, refine=method))
        changed = 0
        for row, head in np.ndindex(B, G):
            where = values["positions"][row, head]
            worth = {}
            for slot, place in enumerate(where.tolist()):
                if place >= 0:
                    v = values["values"][row, head, slot]
                    norms = [(v @ values["output"][head * R + r]).abs().sum() for r in range(R)]
                    worth[place] = float(values["mass"][row, head, slot]), float(sum(norms) / R)
            newest = [int(x["seen"][row]) - 1 - i for i in range(3)]
            stays = [p for p in newest if p in worth]
            best = sorted(worth, key=lambda p: (p not in stays, -worth[p][0]))
            first = best[: max(int(share > 0), int(7 * share))]
            rest = [p for p in worth if p not in first and p not in stays]
            rest.sort(key=lambda p: -(worth[p][0] + 1e-4) * worth[p][1])
            want = list(dict.fromkeys([*stays, *first, *rest]))[:7]
            assert found[row][head] == set(want)
            changed += set(want) != set(best[:7])
        assert changed, "the control"


def test_all_by_score_is_the_base():
    for seed, base in enumerate(("snapkv", "knorm", "h2o", "keydiff")):
        x, score = slots(seed), build("score", base)
        whole, half = (
            sets(choose(x, 6, score, refine=build("refine", "critical-kv", share=share)))
            for share in (1.0, 0.0)
        )
        assert whole == sets(choose(x, 6, score)) and half != whole


def test_larger_values_everywhere_change_nothing():
    x, score, method = slots(1), build("score", "h2o"), build("refine", "critical-kv")
    want = sets(choose(x, 6, score, refine=method))
    for part in ("kept_v", "recent_v"):
        x[part] = x[part] * 7
    assert sets(choose(x, 6, score, refine=method)) == want
    x["recent_v"] = x["recent_v"] * torch.linspace(0, 9, 16)[:, None]
    assert sets(choose(x, 6, score, refine=method)) != want


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_projection_is_that_of_the_model(stateful, name):
    """The sum over heads of what each passes on is what the model's own layer gives."""
    case = evicting(stateful(name), recipe() | {"kv.refine": {"use": "critical-kv"}})
    program = case.program
    (weight, *_) = program.entries["compress"].graph.find_nodes(op="get_attr")
    own = [n for n in program.step.graph.nodes if n.op == "get_attr" and n.target == weight.target]
    (linear,) = own[0].users
    assert linear.target is torch.ops.aten.linear.default
    matrix = program.params[str(weight.target)]
    x = slots(0)
    width = x["kept_v"].shape[3]
    few = {"output": matrix[:, : 4 * width], "kept_v": x["kept_v"]}
    output = Output().read(few)["output"]
    value = torch.randn(4, width)
    mixed = torch.nn.functional.linear(value.flatten(), few["output"])
    torch.testing.assert_close(torch.einsum("hd,hde->e", value, output), mixed)
    norms = projected(value[None, ::2, None], output)[0, :, 0]
    want = (value[0] @ output[0]).abs().sum() + (value[0] @ output[1]).abs().sum()
    torch.testing.assert_close(norms[0], want / 2)


def test_a_latent_has_no_plain_projection(stateful):
    tables = recipe() | {"kv.refine": {"use": "critical-kv"}}
    with pytest.raises(PassError, match="layer 0 has no plain output projection .*a latent"):
        evicting(stateful("plain_latent"), tables)
