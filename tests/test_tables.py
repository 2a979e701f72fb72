"""Tables: how they are measured, read and named by methods, and what is refused."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from accel.compiler.over_state import keys_of
from accel.ir.errors import PassError
from accel.ir.tables import Observed, Rows, Tables
from accel.passes.calibrate import feeds
from accel.passes.kv._shared.tables import measured
from accel.passes.kv.compress import Compress
from accel.passes.kv.keep.drop import Drop
from accel.passes.kv.score.knorm import KNorm
from accel.passes.kv.score.q_filter import QFilter
from accel.passes.trained import constants, sample, write
from accel.runtime.kv.budget import Base as Budget
from accel.runtime.kv.when.prompt import Prompt
from accel.runtime.session.state._kv_plan import KvPlan
from accel.runtime.session.state.eviction import EvictionState

from .kv_case import evicting, kept, recipe
from .kv_slots import C, D, G, choose, sets, slots


def written(method, program, file):
    """A table of random tokens."""
    tokens = torch.randint(3, 60, (2, 25), generator=torch.Generator().manual_seed(0))
    parts = measured(method, program, [(tokens, torch.ones(2, 24))])
    write(method, file, parts, sample(program, keys_of(program)), {})
    return parts


@pytest.fixture
def filters(stateful, tmp_path):
    """The file of filters for conftest's llama, and what is in it."""
    program, file = stateful("llama"), tmp_path / "filters.safetensors"
    return file, written(QFilter(), program, file)


def tables(file, kept=12):
    return {**recipe("knorm", kept), "kv.score": {"use": "q-filter", "table": str(file)}}


def test_what_is_measured_is_what_attention_reads(stateful):
    """Against the queries that the step gives to the entry `compress`."""
    program = evicting(stateful("llama"), recipe("snapkv")).program
    tokens = torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(0))
    seen = []

    class Spy(QFilter):
        def measure(self, rows):
            seen.extend(rows)
            return {}

    measured(Spy(), stateful("llama"), [(tokens, torch.ones(2, 12))])
    with torch.no_grad():
        want = program.run("step", _feeds(program, tokens[:, :-1]))
    for layer, x in seen[0].layers.items():
        torch.testing.assert_close(x.queries.transpose(1, 2), want[f"queries.{layer}"])
        torch.testing.assert_close(x.keys, want[f"kv.{layer}.k.next"])
        assert x.values.shape == x.keys.shape and x.form.scale > 0


def _feeds(program, tokens):
    found = feeds(program, "step", tokens)
    for name, value in found.items():
        if name.startswith("kept."):
            found[name] = value[:, :, :0]
    return found


# Filters


def test_filters_are_the_first_singular_vectors():
    r = torch.Generator().manual_seed(3)
    q = torch.randn(2, 4, 9, D, generator=r) + torch.randn(4, 1, D, generator=r)
    x = Observed(q, q[:, :2], q[:, :2], 1.0)
    halves = [Rows(None, None, {5: Observed(q[[i]], x.keys, x.values, 1.0)}) for i in (0, 1)]
    found = QFilter().measure(halves)[5]["filter"]
    want = torch.zeros(2, D)
    for head in range(4):
        both = q[:, head].reshape(-1, D)
        first = torch.linalg.svd(both).Vh[0]
        want[head // 2] += first * (both @ first).mean().sign() / 2
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


def test_queries_along_one_line_rank_keys_as_their_logits_do():
    r = torch.Generator().manual_seed(4)
    line, keys = torch.randn(D, generator=r), torch.randn(1, 1, C, D, generator=r)
    q = torch.rand(1, 2, 8, 1, generator=r) * line
    table = QFilter().measure([Rows(None, None, {0: Observed(q, keys, keys, 1.0)})])[0]
    scores, logits = QFilter()(keys, **table), (q[:, :1] @ keys.transpose(2, 3)).mean(2)
    assert torch.equal(scores.argsort(2), logits.argsort(2))
    assert not torch.equal((-scores).argsort(2), logits.argsort(2)), "the sign matters"
    torch.testing.assert_close(QFilter()(3 * keys, **table), 3 * scores)


def test_a_session_keeps_what_the_filters_say(stateful, filters):
    file, parts = filters
    case = evicting(stateful("llama"), tables(file))
    tokens = case.tokens(1, 40)
    session, whole = case.session(1), evicting(stateful("llama"), tables(file, 99)).session(1)
    for each in (session, whole):
        each.run(tokens)
        each.end_prompt()
    state = whole._core.backend._state
    for layer, pos in kept(session).items():
        scores = QFilter()(state[f"kv.{layer}.k"][:, :, :40], **parts[layer])
        want = scores.topk(12).indices.sort().values.numpy()
        if layer == 0:
            assert np.array_equal(pos, want)
        assert pos.shape == want.shape


# A budget: a share of each head, on the host and in the graph


@dataclass(frozen=True)
class Shares(Tables, Budget):
    """`share` [G]: what a head keeps of the tokens."""

    key: ClassVar[str] = "shares"

    def sizes(self, width: int, heads: int) -> dict[str, tuple[int, ...]]:
        return {"share": (heads,)}

    def measure(self, rows: Iterable[Rows]) -> dict[int, dict[str, Any]]:
        return {i: {"share": torch.tensor([0.25, 0.5]) + i / 8} for row in rows for i in row.layers}

    def tokens(self, seen: int, layer: int, layers: int, share: Any = ()) -> int:
        return max(1, round(seen * float(share.mean())))

    def most(self, tokens: int, heads: int, share: Any = ()) -> int:
        return int(np.ceil(tokens * share.max() / share.mean()))

    def heads(self, scores: Any, keep: Any, share: Any = ()) -> Any:
        return (keep[:, None] * share / share.mean()).round().long()


def test_a_budget_names_its_table_on_the_host_and_in_the_graph(stateful, tmp_path):
    program, file = stateful("llama"), tmp_path / "shares.safetensors"
    written(Shares(), program, file)
    Compress(KNorm(), Shares(str(file)), Drop()).run(program)
    facts = program.facts
    assert facts.kv.tables[1] == {"share": (0.375, 0.625)}
    plan = KvPlan(Shares(), Prompt(), facts.kv, {0: 2, 1: 2})
    state = EvictionState(plan, 1)
    inputs = state.compress_inputs(np.array([40]), {0: 40, 1: 40}, {0: 0, 1: 0})
    assert (inputs["keep.0"], inputs["keep.1"]) == (15, 20)
    assert [len(inputs[f"ranks.{i}"]) for i in (0, 1)] == [20, 25]
    x = slots(0, base=(0, 0, 0), recent=(16, 16, 16))
    for row in sets(choose(x, 6, KNorm(), Shares())):
        assert [len(head) for head in row] == [4, 8]


# What is refused


def test_a_table_of_something_else_is_refused(stateful, filters, tmp_path):
    file, _ = filters
    tensors, other = load_file(file), tmp_path / "other.safetensors"
    program = stateful("llama")
    keys = keys_of(program)
    told = {"method": "q-filter", "model": sample(program, keys)}

    def refused(words, changed, **metadata):
        save_file(changed, other, told | metadata)
        with pytest.raises(PassError, match=words):
            constants(QFilter(str(other)), program, keys)

    save_file(tensors, other, told)
    assert constants(QFilter(str(other)), program, keys)[1]["filter"].shape[0] == G  # the control
    refused("'headkv-r2'.*measure it", tensors, method="headkv-r2")
    refused(
        "measured for another model.*train q-filter MODEL.*leave `table` out",
        tensors,
        model="[0.5, 0.25]",
    )
    more = {n: torch.cat((t, t)) for n, t in tensors.items()}
    refused(r"0.filter of size \[4, \d+\], this model needs \[2, \d+\]", more)
    del tensors["1.filter"]
    refused(r"1.filter of size \[0\].*measure it again", tensors)
    other.unlink()
    with pytest.raises(PassError, match="does not exist"):
        constants(QFilter(str(other)), program, keys)
    with pytest.raises(PassError, match="the bundled file was measured for another model"):
        constants(QFilter(), program, keys)
