"""The joints for methods to come: each is a folder of files that nobody ships, and touches no other file."""

from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import models
import numpy as np
import pytest
import torch

import accel
from accel.ir import entries
from accel.ir.errors import InputError
from accel.passes import depth
from accel.passes.prefill import prune
from accel.runtime import draft
from accel.runtime.backends.eager import EagerBackend
from accel.runtime.decode.context import DecodeContext
from accel.runtime.draft import Tree
from accel.runtime.length.fixed import Fixed
from accel.runtime.loop.speculative import Speculative
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.session import prompt as rooms
from accel.runtime.session.observers import observer_classes
from accel.runtime.tree.chain import Chain
from accel.runtime.verify.spec_chain import SpecChain

from ..draft_case import plain, rows_of

HERE = Path(__file__).parent
PROMPTS = [[5, 9, 3, 11, 7], [2, 8]]


@pytest.fixture
def joint(monkeypatch):
    """joint(name) -> its files; they are in the axes' folders meanwhile."""

    def get(name):
        for package in (depth, prune, draft, entries, rooms):
            folder = HERE / name / package.__name__.rpartition(".")[2]
            monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        entries.kinds.cache_clear()
        observer_classes.cache_clear()
        return sorted(p.name for p in (HERE / name).rglob("*.py"))

    yield get
    monkeypatch.undo()
    entries.kinds.cache_clear()
    observer_classes.cache_clear()


@pytest.mark.few(1)
@pytest.mark.parametrize("target", ["eager", "onnx"])
def test_a_head_reads_a_hidden_state_and_drafts_from_it(joint, target, tmp_path):
    assert joint("hidden_head") == ["_hidden_head_pass.py", "head.py", "hidden_head.py"]
    recipe = {"draft": {"use": "hidden-head", "layer": 0}}
    out = {"out": tmp_path / "out"} if target == "onnx" else {}
    model = accel.optimize(
        models.llama(), recipe, target=target, max_context=64, max_batch=2, **out
    )
    with model as compiled:
        method = compiled.decoding()[1].methods["draft"]
        with compiled.session(2) as session:
            assert session.extra == ("hidden.0",)
            want = plain(compiled.session(2), rows_of(PROMPTS, limit=12, max_context=64))
            rows = rows_of(PROMPTS, limit=12, max_context=64)
            context = DecodeContext(
                {"draft": method, "verify": SpecChain(), "length": Fixed(1), "tree": Chain()}, None, compiled
            )  # fmt: skip
            list(Speculative().tokens(session, rows, context))
        assert [row.tokens for row in rows] == want
        assert all(row.drafting["drafted"] > 0 for row in rows)
        law_states_are_those_of_the_tokens(compiled, method, want[0])


def law_states_are_those_of_the_tokens(compiled, method, new):
    """Whatever calls they ran in, rejected drafts among them."""
    ids = [*PROMPTS[0], *new]
    with compiled.session() as session:
        whole = session.step([ids], want=["hidden.0"]).extra["hidden.0"]
    with compiled.session() as session:
        drafters = method.open(session, rows_of(PROMPTS[:1]), DecodeContext())
        session.prompt([ids[:5]])
        at = 5
        while at < len(ids) - 3:
            drafted = drafters.draft({0: 1}, None)[0]
            assert isinstance(drafted, Tree) and len(drafted) == 1
            session.run([[*ids[at : at + 2], int(drafted.tokens[0])]])
            session.rewind(at + 2)
            at += 2
        held = drafters._hidden.states[:, :at]
        np.testing.assert_allclose(held, whole[:, :at], atol=2e-4, rtol=1e-3)
        drafters.close()
        session.run([[1]])  # nobody listens any more
        assert not np.allclose(held, np.roll(held, 1, 1)), "the control: positions differ"


@pytest.mark.parametrize("target", ["eager", "onnx"])
def test_tokens_take_a_layer_or_go_round_it(joint, target, tmp_path):
    assert joint("token_router") == ["token_router.py"]
    module = models.llama()
    out = {"out": tmp_path / "out"} if target == "onnx" else {}
    recipe = {"depth": {"use": "token-router", "layer": 1}}
    ids = torch.tensor([[5, 9, 3, 11, 7, 2, 8, 30, 21, 4]])
    want, share = routed(module, ids)
    assert 0 < share < 1, "some take it, and some do not"
    with accel.optimize(module, recipe, target=target, max_context=64, **out) as compiled:
        with compiled.session() as session:
            several = session.run(ids.numpy())
        with compiled.session() as session:
            single = np.concatenate([session.run(ids[:, i : i + 1].numpy()) for i in range(10)], 1)
    for found in (several, single):
        np.testing.assert_allclose(found, want, atol=2e-4, rtol=1e-3)
    assert np.abs(module(ids).logits.detach().numpy() - want).max() > 1e-3, (
        "the control: all take it"
    )


def routed(module, ids):
    """The logits of a model whose second layer changes the stream of tokens that its router takes, and their share."""
    layer, shares = module.model.layers[1], []

    def hook(_, args, result):
        before = args[0]
        taken = before @ torch.linspace(-1, 1, before.shape[2]).roll(7) > 0
        shares.append(float(taken.float().mean()))
        after = result[0] if isinstance(result, tuple) else result
        mixed = torch.where(taken[..., None], after, before)
        return (mixed, *result[1:]) if isinstance(result, tuple) else mixed

    handle = layer.register_forward_hook(hook)
    with torch.no_grad():
        logits = module(ids).logits.numpy()
    handle.remove()
    return logits, shares[0]


@pytest.mark.parametrize("target", ["eager", "onnx"])
def test_embeddings_stand_for_some_tokens(joint, target, tmp_path):
    assert joint("soft_tokens") == ["soft.py", "soft.py", "soft_tokens.py"]
    module = models.llama()
    out = {"out": tmp_path / "out"} if target == "onnx" else {}
    recipe = {"prefill.prune": {"use": "soft-tokens"}}
    ids = np.array([[5, 9, 3, 11, 7, 2]])
    table = module.get_input_embeddings().weight.detach().numpy()
    soft = np.full((1, 6, table.shape[1]), np.nan, np.float32)
    soft[0, 2:4] = np.random.default_rng(0).standard_normal((2, table.shape[1])) * table.std()
    mixed = np.where(np.isnan(soft), table[ids], soft)
    with torch.no_grad():
        want = module(inputs_embeds=torch.from_numpy(mixed.astype(np.float32))).logits.numpy()
        plain_logits = module(torch.from_numpy(ids)).logits.numpy()
    with accel.optimize(module, recipe, target=target, max_context=64, **out) as compiled:
        with compiled.session() as session:
            found = session.run(ids, embeddings=soft)
            np.testing.assert_allclose(found, want, atol=2e-4, rtol=1e-3)
            session.run([[4]])
            assert session.length == 7
        with compiled.session() as session:  # the control: tokens alone are the model
            np.testing.assert_allclose(session.run(ids), plain_logits, atol=2e-4, rtol=1e-3)
        with pytest.raises(InputError, match="build with prefill.prune = soft-tokens"):
            with accel.optimize(models.llama(), target="eager", max_context=64) as other:
                other.session().run(ids, embeddings=soft)
    assert np.abs(want - plain_logits).max() > 1e-3


def test_an_output_is_summed_over_ranks(stateful):
    """Each rank has half of the columns of the output head; together they are the model, whatever a session does."""
    assert [p.name for p in (HERE / "summed_ranks").rglob("*.py")] == ["summed.py"]
    spec = spec_from_file_location("summed", HERE / "summed_ranks" / "backends" / "summed.py")
    summed = module_from_spec(spec)
    spec.loader.exec_module(summed)
    program = stateful("llama")
    head = program.step.output_nodes()["logits"]
    while head.target is not torch.ops.aten.linear.default:
        head = head.all_input_nodes[0]
    name = str(head.args[1].target)
    whole = program.params[name]
    halves = []
    for half in (slice(0, whole.shape[1] // 2), slice(whole.shape[1] // 2, None)):
        rank, part = program.copy(), torch.zeros_like(whole)
        part[:, half] = whole[:, half]
        rank.params[name] = part
        halves.append(EagerBackend(rank))
    ids = np.array([[5, 9, 3, 11, 7], [2, 8, 4, 4, 1]])
    found, alone = [], []
    for backend, log in (
        (summed.Summed(halves), found),
        (EagerBackend(program), alone),
        (halves[0], None),
    ):
        model = CompiledModel(backend, replace(program.facts, max_batch=4))
        with model.session(2) as session, model.session(1) as other:
            outputs = [session.prompt(ids), session.run([[3], [6]], [1, 0])]
            session.rewind([4, 4])
            session.select([1, 0])
            outputs.append(other.run(ids[:1]))
            session.join(other)
            outputs.append(session.run([[3], [6], [9]]))
        if log is None:
            assert np.abs(outputs[0] - alone[0]).max() > 1e-3, (
                "the control: one rank is not the model"
            )
        else:
            log.extend(outputs)
    for a, b in zip(found, alone, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)
