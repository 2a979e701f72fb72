"""tidaldecode: whose list a layer reads, what it equals at its limits, every target, and what is refused."""

import models
import numpy as np
import pytest
import torch

import accel
from accel.compiler.assemble import assemble
from accel.ir.errors import RecipeError
from accel.ir.ops.attention import attention, operands_of
from accel.ir.program import compute
from accel.ir.recipe import Recipe
from accel.ir.region import Region
from accel.passes.kv.select import Layout, Select
from accel.passes.kv.select.tidaldecode import TidalDecode
from accel.passes.recognise import cuts
from accel.passes.recognise.cuts import layer_groups

from ....refused import refuses
from ....select_case import Selecting, built
from ....session_ways import close, law_every_target, singles

DEEP = 6


def deep(name="llama"):
    return models.make(name, DEEP)


@pytest.fixture(scope="module")
def captured():
    """A program over state of six layers."""
    from matrix import over_state

    from accel.ir.capture.capture import capture

    program = over_state(capture(deep(), max_context=128))
    program.facts.max_batch = 2
    return program


def method(**options):
    return built("tidaldecode", **{"dense_layers": 1, "again": 3, **options})


def chosen_by(program):
    """Layer -> the layer whose list it reads; none: it reads everything."""
    found = {}
    for node in program.nodes(attention.default, entry=program.step):
        pages = operands_of(node).pages
        found[node.meta["layer"]] = None if pages is None else pages.meta["layer"]
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [None, None, 1, None, 3, 3]),
        ({"again": 9}, [None, None, 1, 1, 1, 1]),
        ({"dense_layers": 0, "again": 1}, [None, None, 1, 1, 1, 1]),
        ({"dense_layers": 2, "again": 5}, [None, None, None, 2, 2, None]),
    ],
    ids=str,
)
def test_layers_read_the_list_of_the_last_layer_that_chose(captured, options, want):
    program = captured.copy()
    report = Select(method(**options)).run(program)
    assert list(chosen_by(program).values()) == want
    assert report.changed == sum(w is not None for w in want)
    assert len(report.refused) == want.count(None)
    choices = [n for n in program.step.graph.nodes if "choose" in n.name]
    assert len(choices) == len(set(want) - {None}), "who chooses for nobody does not choose"
    assert not [s for s in program.state if s.name.startswith("pages")]


@pytest.mark.long
def test_reading_everything_is_dense(captured):
    case, whole = Selecting(captured.copy(), method(tokens_read=64)), Selecting(captured.copy())
    small = Selecting(captured.copy(), method())
    tokens = case.tokens(2, 56)
    with case.session(2) as a, whole.session(2) as b, small.session(2) as c:
        for session in (a, b, c):
            session.run(tokens[:, :40], np.array([40, 29]))
        want = singles(b, tokens[:, 40:])
        close(singles(a, tokens[:, 40:]), want)
        assert np.abs(singles(c, tokens[:, 40:]) - want).max() > 1e-3


def test_lists_of_each_layers_own_are_exact_top_k(captured):
    """Choosing in every layer, and reading what is chosen, is attention over each group's best logits."""

    class Every(TidalDecode):
        layout = Layout()

    case = Selecting(captured.copy(), Every(tokens_read=7, dense_layers=1, again=3))
    tokens = case.tokens(1, 45)
    with case.session(1) as session:
        session.run(tokens[:, :44])
        inputs = {
            "tokens": tokens[:, 44:], "positions": [[44]], "slots": [44], "rows": [[0]]
        }  # fmt: skip
        given = {n: torch.tensor(np.array(a)) for n, a in inputs.items()}
        given |= session._core.backend._state
        values = {}
        with torch.no_grad():
            for node in case.program.step.graph.nodes:
                if node.op != "output":
                    values[node] = compute(node, case.program.params, given, values)
    readers = list(case.program.nodes(attention.default, entry=case.program.step))
    assert len(readers) == DEEP
    for node in readers[1:]:
        x = operands_of(node)
        q, k, where, pages = (values[n] for n in (x.q, x.k, x.k_pos, x.pages))
        logits = (q.unflatten(1, (k.shape[1], -1)) @ k[:, :, None].transpose(-1, -2)).sum(2)
        logits = logits.masked_fill((where < 0) | (where > 43), -np.inf)
        want = logits[:, :, 0].topk(6).indices.sort().values
        assert torch.equal(pages[:, :, 0, 1:].sort().values, want)
        assert (pages[:, :, 0, 0] == 44).all()


def test_layers_with_other_masks_or_heads_do_not_read_the_list(captured):
    program = captured.copy()
    for node in program.nodes(attention.default, entry=program.step):
        if node.meta["layer"] == 4:
            node.args = (*node.args[:8], "window", 5, *node.args[10:])
    report = Select(method()).run(program)
    assert list(chosen_by(program).values()) == [None, None, 1, None, None, 3]
    assert any("sees other tokens than layer 3" in line for line in report.refused)


def test_a_layer_that_cannot_choose_leaves_its_readers_dense(captured):
    program = captured.copy()
    for node in program.nodes(attention.default, entry=program.step):
        if node.meta["layer"] == 1:
            node.args = (
                *node.args[:5],
                node.args[3],
                *node.args[6:],
            )  # a bias, of whatever numbers
    report = Select(method()).run(program)
    assert list(chosen_by(program).values()) == [None, None, None, None, 3, 3]
    assert any("layer 1, whose list it would read, chooses none" in x for x in report.refused)


# Targets


def compiled(target):
    options = {"use": "tidaldecode", "tokens_read": 7, "dense_layers": 1, "again": 3}
    return accel.optimize(
        deep(), {"kv": {"select": options}}, target=target, max_context=128, max_batch=2,
        verify=target == "onnx",
    )  # fmt: skip


def test_a_list_goes_from_one_layers_region_to_others():
    """The residual stream is cut all the same."""
    graph = compiled("eager").program.step.graph
    regions = [n for n in graph.nodes if isinstance(n.target, Region)]
    assert [n.target.name for n in regions] == [f"layer.{i}" for i in range(DEEP)]

    def taken(i):
        return {
            next(j for j, r in enumerate(regions) if r is item.args[0])
            for item in regions[i].args
            if isinstance(item, torch.fx.Node) and item.args and item.args[0] in regions
        }

    assert [taken(i) - {i - 1} for i in range(2, DEEP)] == [set(), set(), set(), {3}]


def test_a_list_is_no_way_around_the_residual_stream(captured, monkeypatch):
    program = captured.copy()
    Select(method()).run(program)
    assert len(layer_groups(program)) == DEEP
    found = len(cuts.cut_points(program))
    monkeypatch.setattr(cuts, "borrowed", lambda graph: set())
    assert len(cuts.cut_points(program)) < found, "the control"


@pytest.mark.long
def test_every_way_through_a_session_is_that_of_the_oracle():
    law_every_target(compiled("onnx"))


# Bad input


test_options_that_make_no_sense = refuses(
    "kv.select.tidaldecode",
    ({"page": 16}, "kv.select.tidaldecode: page is 16; give 1"),
    (
        {"again": 2},
        r"kv.select.tidaldecode: again is 2; give a layer after the first that chooses, 2 \(dense_layers\)",
    ),
    (
        {"dense_layers": 9},
        r"kv.select.tidaldecode: again is 9; give a layer after the first that chooses, 9 \(dense_layers\)",
    ),
    ({"tokens_read": 0}, "kv.select.tidaldecode: tokens_read is 0; give at least 1"),
)


def test_methods_that_skip_layers_are_refused():
    with pytest.raises(
        RecipeError, match="tidaldecode cannot be combined with depth = calm: .*ALL_LAYERS_RUN"
    ):
        assemble(Recipe(tables={"kv.select": {"use": "tidaldecode"}, "depth": {"use": "calm"}}))
