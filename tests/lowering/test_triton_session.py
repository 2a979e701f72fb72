"""Sessions on the Triton target as a GPU runs them, with a recorder that calls in place of CUDA graphs."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import matrix
import numpy as np
import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

import accel
from accel.ir.axis import find_axes
from accel.ir.ops.pages import few_to_many
from accel.lowering.triton.lowered import Compiled
from accel.lowering.triton.writer import builder, flags
from accel.runtime.backends.triton import session as sessions
from accel.runtime.backends.triton.recorded import Recorded
from accel.runtime.backends.triton.sheet import Sheet
from accel.runtime.inputs.distant import Distant

from ..session_ways import close
from .test_triton_models import beside, module

aten = torch.ops.aten


class Replays:
    """A recording that calls again; as a CUDA graph, it writes over what it gave."""

    def __init__(self, run):
        self._run, self.count = run, 0
        self.out = tuple(t.clone() for t in run())

    def replay(self):
        self.count += 1
        for place, value in zip(self.out, self._run(), strict=True):
            place.copy_(value)


class Recorder:
    def __init__(self, kind=Replays):
        self.kind, self.made = kind, []

    def __call__(self, run):
        self.made.append(self.kind(run))
        return self.made[-1]


def refusing(run):
    raise RuntimeError("operation not permitted when stream is capturing")


def given(*numbers):
    return torch.tensor(numbers, dtype=torch.uint8)


def double(inputs):
    return (2 * inputs,)


# Recordings


def test_the_second_call_of_a_key_is_recorded_and_later_ones_are_replayed():
    recorder = Recorder()
    calls = Recorded(recorder, "cpu")
    found = [calls("a", given(n), double)[0].tolist() for n in (1, 2, 3)]
    assert found == [[2], [4], [6]] and len(recorder.made) == 1 and recorder.made[0].count == 2
    calls("b", given(1), double)
    assert "a" in calls and "b" not in calls


def test_inputs_are_copied_to_where_the_recording_reads_them():
    recorder, mine = Recorder(), given(7)
    calls = Recorded(recorder, "cpu")
    for _ in range(2):
        calls("a", mine, double)
    mine[0] = 9
    recorder.made[0].replay()
    assert recorder.made[0].out[0].tolist() == [14], "the caller's memory is not read"


def test_so_many_recordings_are_held_and_those_used_last():
    calls = Recorded(Recorder(), "cpu", most=2)
    for key in ("a", "a", "b", "b", "a", "c", "c"):
        calls(key, given(1), double)
    assert "a" in calls and "c" in calls and "b" not in calls and len(calls) == 2


def test_moved_buffers_drop_recordings_and_kernels_run_once_before_the_next():
    recorder = Recorder()
    calls = Recorded(recorder, "cpu")
    for _ in range(2):
        calls("a", given(1), double)
    calls.drop()
    assert "a" not in calls
    assert calls("a", given(4), double)[0].tolist() == [8] and "a" not in calls
    calls("a", given(5), double)
    assert "a" in calls and len(recorder.made) == 2


def test_a_refused_recording_runs_as_it_is_and_in_the_end_none_is_tried():
    asked = []

    def recorder(run):
        asked.append(run)
        return refusing(run)

    calls = Recorded(recorder, "cpu")
    for key in "aaabbbcccddd":
        assert calls(key, given(3), double)[0].tolist() == [6]
    assert len(asked) == 3 and "capturing" in calls.refused["a"] and len(calls) == 0


def test_a_sheet_holds_arrays_of_all_types():
    arrays = {
        "tokens": np.array([[3, 4, 5]]), "tree": np.tri(3, dtype=bool)[None], "slots": np.array([7]),
        "embeds": np.linspace(0, 1, 6, dtype=np.float32).reshape(1, 3, 2),
    }  # fmt: skip
    sheet = Sheet.of(arrays)
    assert sheet is Sheet.of({n: a.copy() for n, a in arrays.items()})
    assert sheet is not Sheet.of({**arrays, "slots": np.array([7, 8])})
    for name, value in sheet.views(sheet.filled(arrays)).items():
        assert np.array_equal(value.numpy(), arrays[name]) and value.data_ptr() % 16 == 0


# Logits that stay where they are


def distant(logits, fetched=None):
    """Logits [B,N,V] as a device gives them; `fetched` notes what is asked of it."""
    flat = logits.reshape(-1, logits.shape[-1])

    def whole():
        fetched.append("whole")
        return flat.copy()

    def largest(count):
        fetched.append(count)
        order = np.argsort(-flat, axis=1, kind="stable")[:, :count]
        return order, np.take_along_axis(flat, order, 1)

    source = SimpleNamespace(whole=whole, largest=largest)
    return Distant.of(source, logits.argmax(-1), logits.max(-1), logits.shape[-1])


@pytest.fixture
def logits():
    return np.random.default_rng(0).normal(size=(2, 3, 300)).astype(np.float32)


def test_the_likeliest_is_known_without_the_others(logits):
    far = distant(logits, fetched := [])
    assert far.shape == logits.shape and far.ndim == 3 and far.size == logits.size and len(far) == 2
    assert np.array_equal(far.argmax(-1), logits.argmax(-1))
    assert np.array_equal(far[1, :2].max(-1), logits[1, :2].max(-1))
    assert far[0, 1].argmax() == logits[0, 1].argmax() and far[None].shape == (1, *logits.shape)
    assert np.array_equal(far[[1, 0], 2].argmax(-1), logits[[1, 0], 2].argmax(-1))
    real = np.array([[True, True, False], [True, False, False]])
    assert (far.only(real).argmax(-1) == np.where(real, logits.argmax(-1), 0)).all()
    assert fetched == []
    assert np.array_equal(far.only(real), logits * real[..., None])


def test_anything_else_is_as_of_an_array_and_fetched_once(logits):
    far = distant(logits, fetched := [])
    for read in (
        lambda x: x + 1,
        lambda x: 2 > x,
        lambda x: x[..., :7],
        lambda x: x[:, :, 4],
        lambda x: np.exp(x[0, 1]),
        lambda x: x.astype(np.float64),
        lambda x: x.argmax(0),
        lambda x: np.concatenate([x, x]),
        lambda x: x[np.array([True, False])],
        lambda x: x[np.ones((2, 3), bool)],
    ):
        assert np.array_equal(np.asarray(read(far)), read(logits))
    assert fetched == ["whole"]
    mine = np.asarray(far[0, 0])
    mine[:] = 0
    assert np.array_equal(far[0, 0], logits[0, 0]), "what is read is the caller's"


@pytest.mark.parametrize("count", [1, 5, 63, 64, 100])
def test_the_largest_few_are_those_of_an_array(logits, count):
    logits[0, 0, :40] = logits.max() + 1  # equals at the border
    far = distant(logits, fetched := [])
    for b, n in ((0, 0), (1, 2)):
        least = np.partition(logits[b, n], -count)[-count]
        want = np.flatnonzero(logits[b, n] >= least)
        ids, values = far[b, n].largest(count)
        assert np.array_equal(ids, want) and np.array_equal(values, logits[b, n][want])
    assert len(fetched) == 1 and fetched[0] > count


def test_where_too_many_are_equal_all_are_asked_for():
    far = distant(np.zeros((1, 1, 300), np.float32), [])
    assert far[0, 0].largest(5) is None


# Sessions


@pytest.fixture(scope="module")
def eager():
    with accel.optimize(
        module("llama"), target="eager", max_context=64, max_batch=2, verify=False
    ) as model:
        yield model


@pytest.fixture
def recorders(monkeypatch):
    """Those of the sessions that open, in their order."""
    made = []
    monkeypatch.setattr(sessions, "recorder", lambda device: made.append(Recorder()) or made[-1])
    return made


IDS = np.random.default_rng(3).integers(3, 50, (2, 40))


def test_calls_of_each_shape_are_recorded_and_right(eager, recorders):
    with beside(eager) as model, model.session(2) as session, eager.session(2) as other:
        at = 0
        for width, counts in (
            (5, None),
            (1, None),
            (3, None),
            (1, None),
            (3, [3, 2]),
            (1, None),
            (3, None),
        ):
            part = IDS[:, at : at + width]
            close(session.run(part, counts), other.run(part, counts))
            at += width
        recorded = session._core.backend._recorded
        assert len(recorded) == 2 and not recorded.refused
        assert sorted(one.count for one in recorders[0].made) == [2, 2]


def test_logits_stay_what_they_were_when_the_next_step_runs(eager, recorders):
    with beside(eager) as model, model.session(2) as session, eager.session(2) as other:
        far = [session.run(IDS[:, n : n + 1], here=False) for n in range(4)]
        want = [other.run(IDS[:, n : n + 1]) for n in range(4)]
        assert isinstance(far[3], Distant) and recorders[0].made[0].count == 3
        for got, logits in zip(far, want, strict=True):
            close(np.asarray(got), logits)
        mine = session.run(IDS[:, 4:5])
        assert isinstance(mine, np.ndarray)
        mine[:] = 0
        session.rewind(4)
        assert session.run(IDS[:, 4:5]).any()


def test_a_moved_buffer_drops_what_was_recorded(eager, recorders):
    with beside(eager) as model, model.session(1) as session, eager.session(1) as other:
        for n in range(3):
            session.run(IDS[:1, n : n + 1]), other.run(IDS[:1, n : n + 1])
        backend = session._core.backend
        assert len(backend._recorded) == 1
        backend.resize(96)
        assert len(backend._recorded) == 0
        for n in range(3, 6):
            close(session.run(IDS[:1, n : n + 1]), other.run(IDS[:1, n : n + 1]))
        assert len(backend._recorded) == 1 and len(recorders[0].made) == 2


def test_a_refused_recording_falls_back(eager, monkeypatch):
    monkeypatch.setattr(sessions, "recorder", lambda device: refusing)
    with beside(eager) as model, model.session(1) as session, eager.session(1) as other:
        for n in range(3):
            close(session.run(IDS[:1, n : n + 1]), other.run(IDS[:1, n : n + 1]))
        assert len(session._core.backend._recorded.refused) == 1


class Fetches:
    """Notes what sessions read of logits besides the likeliest."""

    def __init__(self, monkeypatch):
        self.found = []
        for name in ("whole", "largest"):
            was = getattr(sessions._Lying, name)
            monkeypatch.setattr(
                sessions._Lying,
                name,
                lambda *args, was=was, name=name: self.found.append(name) or was(*args),
            )


def test_what_a_request_reads_of_the_logits(eager, monkeypatch):
    fetches = Fetches(monkeypatch)
    with beside(eager) as model:
        for options, want in (
            ({}, set()),
            ({"temperature": 0.8, "top_k": 5, "seed": 3}, {"largest"}),
            ({"temperature": 0.8, "seed": 3}, {"whole"}),
        ):
            fetches.found.clear()
            got = model.generate([[5, 9, 40]], 3, eos=[], **options).tokens
            prompts = fetches.found.count("whole") if "whole" not in want else 0
            assert prompts <= 1, "of a prompt the last logits are read whole"
            assert {f for f in fetches.found[prompts:]} == want
            assert got == eager.generate([[5, 9, 40]], 3, eos=[], **options).tokens


# Plans


HALF = {"about": "", "papers": [], "depth": {"use": "unified-skip"}}


@pytest.mark.long
def test_a_plan_is_decided_on_the_host_and_recorded(recorders):
    with (
        accel.optimize(
            module("llama", 4), HALF, target="eager", max_context=64, verify=False
        ) as eager,
        beside(eager) as model,
    ):
        compiled = model.program.compiled["step"]
        assert compiled.plan == ("run_layers",) and not compiled.waits
        with model.session() as session, eager.session() as other:

            def both(token, ours=session, theirs=other, plan=None):
                told = {} if plan is None else {"run_layers": np.array(plan, bool)}
                part = IDS[:1, token : token + 1]
                close(ours.run(part, **told), theirs.run(part, **told))

            for token in range(4):  # all layers in the first, then half of them
                both(token)
            assert len(session._core.backend._recorded) == 1
            fewer = [1, 0, 0, 0]
            with session.fork() as ours, other.fork() as theirs:
                both(4, ours, theirs, fewer)
                both(4)  # by its own plan
            for token in range(5, 8):
                both(token, plan=fewer)
            assert len(session._core.backend._recorded) == 2


@pytest.mark.long
def test_a_flag_of_the_device_is_not_recorded(recorders):
    table = {"about": "", "papers": [], "depth": {"use": "calm", "threshold": 0.03}}
    with (
        accel.optimize(
            module("llama", 4), table, target="eager", max_context=64, verify=False
        ) as eager,
        beside(eager) as model,
        model.session() as session,
    ):
        assert model.program.compiled["step"].waits and session._core.backend._recorded is None


# Selections


ASKING = {  # whose results have sizes that the host asks the device for, or are of the host
    torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select,
    torch.ops.aten._unique2, torch.ops.aten.bincount, torch.ops.aten.equal,
}  # fmt: skip


class Asked(TorchDispatchMode):
    """Notes the operators that a GPU's host waits for."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        lists = args[1] if func is torch.ops.aten.index.Tensor else ()
        if func.overloadpacket in ASKING or any(
            i is not None and i.dtype is torch.bool for i in lists
        ):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def selecting(name):
    axis = find_axes()["kv.select"]
    recipe = {"kv.select": {"use": name, **axis.small(name)}}
    return accel.optimize(module("llama"), recipe, target="eager", max_context=64, verify=False)


def tokens_alike(model, eager, count=3, asked=None):
    """Single tokens behind more than are read, on both; gives the number of recordings. `asked`: an Asked."""
    with model.session() as session, eager.session() as other:
        for begin, end in ((0, 14), *((n, n + 1) for n in range(14, 14 + count))):
            with asked or nullcontext():
                got = session.run(IDS[:1, begin:end])
            close(got, other.run(IDS[:1, begin:end]))
        return len(session._core.backend._recorded or ())


def test_a_selection_is_decided_on_the_host():
    with selecting("quest") as eager, beside(eager) as model:
        assert not model.program.compiled["step"].waits


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["quest", "tidaldecode", "leoam", "shadowkv", "tokenselect", "specache", "clusterkv", "louiskv", "rwkv-x"],
)  # fmt: skip
def test_a_selection_is_recorded_and_asks_the_host_nothing(name, recorders):
    asked = Asked()
    with selecting(name) as eager, beside(eager) as model:
        assert tokens_alike(model, eager, asked=asked) == 1 and recorders[0].made[0].count == 2
    assert not asked.found


def test_what_a_host_waits_for_is_seen():
    x = torch.arange(3.0)
    with Asked() as asked:
        x[x > 1], x.max().item(), x[[0, 2]]
    assert len(asked.found) == 2


def test_a_selection_that_is_not_made_is_seen(monkeypatch):
    monkeypatch.setitem(builder.BY_SHAPES, few_to_many.default, lambda *_: False)
    with selecting("quest") as eager, beside(eager) as model:
        with pytest.raises(AssertionError, match="Not equal"):
            tokens_alike(model, eager, 1)


@pytest.mark.long
def test_a_selection_that_goes_by_values_is_not_recorded(recorders):
    with selecting("sentencekv") as eager, beside(eager) as model:
        assert model.program.compiled["step"].waits
        assert tokens_alike(model, eager) == 0


@pytest.fixture(scope="module")
def foretelling():
    case = matrix.Case("llama", (("kv.select", "attention-predictor"),))
    with matrix.Matrix().eager(case) as eager:
        yield eager


@pytest.mark.long
def test_a_selection_that_goes_by_positions_is_recorded_either_way(foretelling, recorders):
    """Every third token looks at all keys; the host knows which."""
    asked = Asked()
    with beside(foretelling) as model:
        assert not model.program.compiled["step"].waits
        assert tokens_alike(model, foretelling, 7, asked) == 2 and not asked.found
        assert len(model.program.compiled["step"].flags) == 1, "one for all layers"


@pytest.mark.long
def test_a_token_that_does_not_look_is_seen(foretelling, monkeypatch):
    monkeypatch.setattr(flags.Flag, "__call__", lambda *_: False)
    with beside(foretelling) as model, pytest.raises(AssertionError, match="Not equal"):
        tokens_alike(model, foretelling, 7)


def test_a_flag_of_the_call_is_the_hosts():
    graph = fx.Graph()
    names = {graph.placeholder(n): n for n in ("positions", "held")}
    positions, held = names
    held.meta["val"] = torch.empty(1, 5, device="meta")
    due = graph.call_function(aten.eq.Scalar, (positions, 3))
    due = graph.call_function(aten.any.default, (due,))
    few = graph.call_function(few_to_many.default, (positions, held, 2, 4))
    both = graph.call_function(aten.logical_and.default, (due, few))
    flag = flags.flag_of(both, names)
    for place, slots, want in ((3, 5, True), (2, 5, False), (3, 4, False)):
        given = {"positions": torch.tensor([[place]]), "held": torch.empty(1, slots, device="meta")}
        assert flag(given) is want
    of_the_device = graph.call_function(aten.any.default, (held,))
    either = graph.call_function(aten.logical_or.default, (both, of_the_device))
    assert flags.flag_of(of_the_device, names) is None and flags.flag_of(either, names) is None


# The host's work


class Nothing:
    """A recording whose replay costs nothing."""

    def __init__(self, run):
        self.out = tuple(t.clone() for t in run())

    def replay(self):
        pass


def launches(compiled, args, plan=None):
    """In place of a step's kernels: for each a call that does nothing."""
    for node in compiled.module.graph.nodes:
        id(node)
    rows = args[compiled.inputs.index("rows")]
    logits = torch.zeros(*rows.shape, 128)
    return tuple(logits if name == "logits" else logits[..., 0] for name in compiled.outputs)


def work_of_a_step(model, tokens: int) -> int:
    """Functions that Python calls, its own and built-in ones, in a greedy step behind so many tokens."""
    with model.session(1) as session:
        session.run(IDS[:1, :tokens])
        for n in range(3):
            session.run(IDS[:1, n : n + 1], here=False)
        count = 0

        def note(frame, event, argument):
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            session.run(IDS[:1, 3:4], here=False).argmax(-1)
        finally:
            sys.setprofile(None)
        return count


def test_the_hosts_work_in_a_step_does_not_grow(eager, monkeypatch):
    monkeypatch.setattr(Compiled, "__call__", launches)
    monkeypatch.setattr(sessions, "recorder", lambda device: Recorder(Nothing))
    with (
        accel.optimize(module("llama", 4), target="eager", max_context=64, verify=False) as larger,
        beside(eager) as small,
        beside(larger) as large,
    ):
        least = work_of_a_step(small, 4)
        assert least < 300
        assert work_of_a_step(small, 30) == least, "with the context"
        assert work_of_a_step(large, 4) == least, "with the layers"
        monkeypatch.setattr(sessions, "recorder", lambda device: None)
        more = [work_of_a_step(model, 4) for model in (small, large)]
        assert least < more[0] < more[1], "a step that is not recorded launches each kernel"
