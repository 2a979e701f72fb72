"""What a session promises its observers: who is asked when, and that what is refused or fails changes none of them."""

from inspect import getsource

import numpy as np
import pytest

from accel.ir.errors import AccelError, InputError
from accel.ir.facts import Facts
from accel.ir.kv import KvFacts
from accel.ir.prefill import Pick
from accel.runtime.call import Outputs
from accel.runtime.kv.budget.uniform import Uniform
from accel.runtime.kv.when.prompt import Prompt
from accel.runtime.session import core, state
from accel.runtime.session import session as session_module
from accel.runtime.session.observers import observer_classes, observer_factories
from accel.runtime.session.observers.observer import (
    CallWatcher,
    Capabilities,
    ModelParts,
    PromptRunner,
    SessionObserver,
)
from accel.runtime.session.prompt.pruning import PromptPruning
from accel.runtime.session.session import Session
from accel.runtime.session.state._kv_plan import KvPlan
from accel.runtime.session.state.eviction import EvictionState
from accel.runtime.session.state.recurrent_history import RecurrentHistory


class Counts:
    """A backend session whose state is how many tokens came; `fails`: at which step."""

    tile, flat, alike, kv_bytes, kv_mapped = 1, False, None, 0, 0
    entries, extra = ("step",), ("queries.0", "hidden.1")

    def __init__(self, fails=0):
        self.fails, self.steps, self.sizes, self.asked, self.forgot = fails, 0, [], [], []

    def resize(self, *sizes):
        self.sizes.append(sizes)

    def step(self, tokens, positions, slots, rows, want=(), tree=None, embeds=None):
        self.steps += 1
        if self.steps == self.fails:
            raise MemoryError("no room")
        self.asked.append(list(want))
        extra = {name: np.repeat(tokens[..., None] * 1.0, 4, 2) for name in want}
        return Outputs(np.zeros((*rows.shape, 8), np.float32), extra)

    def forget(self, rows):
        self.forgot.append(rows)

    def copy(self):
        return Counts()

    def close(self):
        pass


class Diary(SessionObserver, CallWatcher):
    """Writes down what it is asked, into a list that several share."""

    def __init__(self, name, book):
        self.name, self.book, self.watches, self.gone, self.stops = name, book, False, False, ""

    def _note(self, what, result=None):
        self.book.append(f"{self.name} {what}")
        if what == self.stops:
            raise MemoryError(what)
        return result

    def begin(self, backend, call):
        self._note(f"begin {call.before.tolist()} {call.after.tolist()}")

    def before(self, backend, width):
        return self._note(f"before {width}", ["queries.0"] if self.watches else [])

    def after(self, tokens, positions, extra):
        self._note(f"after {positions.tolist()} {list(extra)}")

    def settle(self, backend, moment, lengths):
        return self._note(f"settle {moment} {lengths.tolist()}")

    def lost(self):
        return self.gone

    def undo(self, backend, lengths):
        return self._note(f"undo {lengths.tolist()}", False)

    def check(self, new_lengths, lengths):
        self._note(f"check {new_lengths.tolist()}")

    def rewind(self, backend, new_lengths, lengths):
        return self._note(f"rewind {new_lengths.tolist()}", False)

    def copy(self):
        return Diary(self.name + "'", self.book)


IDS = np.ones((2, 3), np.int64)


def session(backend, *observers):
    return Session(backend, 2, observers, vocab_size=8, max_context=4000)


def diaries(backend, *names):
    book = []
    found = [Diary(name, book) for name in names]
    return session(backend, *found), found, book


def test_all_are_asked_in_their_order():
    live, _, book = diaries(Counts(), "a", "b")
    live.run(IDS, [3, 2])
    live.end_prompt()
    live.rewind([1, 2])
    where = "[[0, 1, 2], [0, 1, -1]] []"
    asked = ["begin [0, 0] [3, 2]", "before 3", f"after {where}", "settle call [3, 2]"]
    asked += ["settle prompt [3, 2]", "check [1, 2]", "rewind [1, 2]"]
    assert book == [f"{name} {what}" for what in asked for name in "ab"]


def test_queries_are_taken_where_someone_asks():
    live, (_, second), book = diaries(Counts(), "a", "b")
    live.run(IDS)
    second.watches = True
    live.run(IDS)
    assert live._core.backend.asked == [[], ["queries.0"]]
    assert [entry.split("]] ")[1] for entry in book if " after " in entry] == ["[]"] * 2 + [
        "['queries.0']"
    ] * 2


def test_outputs_are_given_by_name_in_the_order_of_the_tokens():
    live, (first, _), _ = diaries(Counts(), "a", "b")
    first.watches = True
    tokens = np.arange(1200).reshape(2, 600) % 8
    out = live.step(tokens, [600, 2], want=["hidden.1"])
    assert out.extra["hidden.1"].shape == (2, 600, 4) and set(out.extra) == {"hidden.1"}
    np.testing.assert_array_equal(out.extra["hidden.1"][0, :, 0], tokens[0])
    np.testing.assert_array_equal(out.extra["hidden.1"][1, :3, 0], [*tokens[1, :2], 0])
    assert live._core.backend.asked == [["queries.0", "hidden.1"]] * 2
    last = live.step([[5, 6], [7, 0]], [2, 1], want=["hidden.1"], last_only=True)
    assert last.extra["hidden.1"][:, 0, 0].tolist() == [6, 7]
    assert live.step(IDS).extra == {} and live.extra == ("queries.0", "hidden.1")


def test_a_listener_hears_of_a_tree_what_is_kept():
    class Listens(CallWatcher):
        def before(self, backend, width):
            return ["hidden.1"]

        def after(self, tokens, positions, extra):
            heard.append((positions[0].tolist(), extra["hidden.1"][0, :, 0].tolist()))

    heard, backend, listener = [], Counts(), Listens()
    backend.trees, backend.part = True, lambda entry, inputs: {}
    live = session(backend)
    live.run([[1, 2], [3, 4]])
    live.listen(listener)
    seen = np.tril(np.ones((3, 3), bool))
    seen[2, 1] = False  # two branches behind the first token
    live.guess([[5, 6, 7], [5, 6, 7]], np.stack([seen, seen]))
    assert not heard, "nothing is kept yet"
    live.keep([[0, 2], [0]])
    assert heard == [([2, 3], [5.0, 7.0])]
    live.unlisten(listener)
    live.run(IDS)
    assert len(heard) == 1 and live.fork()._core.listeners == ()


def test_an_output_or_a_control_that_nobody_has_is_refused_by_name():
    live, _, book = diaries(Counts(), "a", "b")
    for call, words in (
        (lambda: live.step(IDS, want=["hidden.2"]), "output 'hidden.2' does not exist; did you mean 'hidden.1'"),
        (lambda: live.run(IDS, run_layer=[True]), "control of a call 'run_layer' does .*; did you mean 'run_layers'"),
        (lambda: live.run(IDS, run_layers=[True]), "run_layers and threshold need a model"),
        (lambda: live.run(IDS, coarse=True), "coarse: this model reads its cache in one way"),
        (lambda: live.entry("head", {}), "entry 'head' does not exist"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            call()
    assert live.length == 0 and not book


def test_a_control_is_told_to_those_that_declare_it():
    class Loud(SessionObserver, CallWatcher):
        controls = {"volume": "build with a recipe that has one"}

        def begin(self, backend, call):
            heard.append(dict(call.controls))

    heard = []
    live = session(Counts(), Loud())
    live.run(IDS, volume=3)
    live.run(IDS, volume=None)
    assert heard == [{"volume": 3}, {}]


def test_outputs_of_tokens_that_no_step_ran_are_refused():
    class Runs(SessionObserver, PromptRunner):
        def run(self, calls, tokens, counts, last_only, prompt):
            calls.heard(tokens, np.tile(np.arange(3), (2, 1)))
            return np.zeros((2, 3, 8), np.float32)

    live = session(Counts(), Runs())
    with pytest.raises(InputError, match=r"hidden\.1: this model's recipe runs tokens"):
        live.step(IDS, want=["hidden.1"])


def test_a_call_that_fails_is_undone_by_all_and_kept_by_none():
    live, _, book = diaries(Counts(fails=2), "a", "b")
    live.run(IDS)
    book.clear()
    with pytest.raises(MemoryError):
        live.run(IDS)
    assert live.length == 3 and book[-2:] == ["a undo [3, 3]", "b undo [3, 3]"]
    assert not any("settle" in entry for entry in book)


def test_a_call_that_one_cannot_take_back_closes_the_session():
    live, (_, second), book = diaries(Counts(fails=1), "a", "b")
    second.gone = True
    with pytest.raises(AccelError, match="MemoryError: no room.*closed, open another"):
        live.run(IDS)
    assert not any("undo" in entry for entry in book)
    with pytest.raises(InputError, match="closed"):
        live.rewind(0)


@pytest.mark.parametrize("held", [0, 2])
def test_a_prompt_that_fails_at_its_end_leaves_none_of_its_tokens(held):
    live, (_, second), book = diaries(Counts(), "a", "b")
    if held:
        live.run(IDS[:, :held])
    second.stops = f"settle prompt {[held + 3, held + 2]}"
    with pytest.raises(MemoryError):
        live.prompt(IDS, [3, 2])
    assert live.length == held
    assert book[-2:] == [f"{name} rewind {[held, held]}" for name in "ab"]


def test_a_fork_has_observers_of_its_own():
    live, _, book = diaries(Counts(), "a")
    live.run(IDS)
    other = live.fork()
    book.clear()
    other.run(IDS[:, :1])
    assert {entry.split()[0] for entry in book} == {"a'"} and other.stats["calls"] == 1
    assert live.length == 3 and other.length == 4


def test_tokens_that_run_again_are_news_to_one_alone():
    class Lacks(SessionObserver, CallWatcher):
        base = np.array([2, 2])
        due = True

        def catch_up(self, backend, lengths):
            again, self.due = self.due, False
            return (IDS, np.array([3, 3]), np.array([4, 4])) if again else None

        def after(self, tokens, positions, extra):
            seen.append(positions[0].tolist())

    seen, book = [], []
    live = session(Counts(), Lacks(), Diary("a", book))
    live._core.lengths = np.array([7, 7])
    live.run(IDS[:, :1])
    assert seen == [[4, 5, 6], [7]]
    assert [entry for entry in book if "after" in entry] == ["a after [[7], [7]] []"]


def test_a_state_that_went_forward_knows_it_whatever_fails_behind_it():
    backend = Counts()
    backend.snapshot, backend.restore = lambda: None, lambda *_: None
    past, other = RecurrentHistory(2), Diary("a", [])
    live = session(backend, past, other)
    other.stops = "after [[0, 1, 2], [0, 1, 2]] []"
    with pytest.raises(MemoryError):
        live.run(IDS)
    assert past._taken.tolist() == [3, 3] and live.length == 0


def compressed_and_pruned():
    """A session that no build makes, of rows of 9 tokens, and what its observers know: the first 2 are compressed,
    and the first 4 were pruned.
    """
    plan = KvPlan(Uniform(tokens_kept=4), Prompt(), KvFacts(observe=2), {0: 1})
    eviction, pruning = EvictionState(plan, 2), PromptPruning((Pick(2, 0, 1),), 2)
    live = session(Counts(), eviction, pruning)
    eviction.base, eviction._query_positions = np.array([2, 2]), {0: np.array([[7, 8], [7, 8]])}
    pruning.ends, pruning.dropped = np.array([4, 4]), np.array([[2, 2]])
    live._core.lengths = np.array([9, 9])
    known = {
        one: {n: v.copy() for n, v in vars(one).items() if isinstance(v, np.ndarray)}
        for one in (eviction, pruning)
    }
    return live, known


def law_a_refused_rewind_changes_nothing():
    live, before = compressed_and_pruned()
    for wanted in ([0, 3], [3, 0], [0, 1], [8, 3]):
        with pytest.raises(InputError, match="cannot rewind row"):
            live.rewind(wanted)
        assert live.length == 9 and not live._core.backend.forgot
        for one, known in before.items():
            assert all(np.array_equal(getattr(one, name), value) for name, value in known.items())
    assert live.held_from.tolist() == [4, 4]
    live.rewind([0, 5])
    assert live.held_from.tolist() == [0, 4] and live._core.backend.forgot[0].tolist() == [
        True,
        False,
    ]


def test_a_refused_rewind_changes_nothing():
    law_a_refused_rewind_changes_nothing()


def test_one_that_refuses_too_late_is_caught(monkeypatch):
    check = PromptPruning.check
    monkeypatch.setattr(PromptPruning, "check", lambda self, wanted, lengths: None)
    monkeypatch.setattr(
        PromptPruning, "rewind", lambda self, backend, wanted, lengths: check(self, wanted, lengths)
    )
    with pytest.raises(AssertionError):
        law_a_refused_rewind_changes_nothing()


def test_what_two_can_do_is_the_least_of_both():
    both = Capabilities(back=3) & Capabilities(free_rewind=False, back=5, width=2)
    assert (
        both == Capabilities(free_rewind=False, back=3, width=2) and Capabilities() & both == both
    )


NEW = '''
"""An observer that nobody has heard of."""

from accel.runtime.session.observers.observer import SessionObserver, ObserverFactory


class Newcomer(SessionObserver):
    order = 15

    @classmethod
    def for_model(cls, model):
        return ObserverFactory(lambda batch: cls()) if "newcomer" in model.tables else None
'''


def test_a_file_is_an_observer(tmp_path, monkeypatch):
    """It stands in its place by its order, and in the sessions of a model that asks for it."""
    (tmp_path / "newcomer.py").write_text(NEW)
    (tmp_path / "_helper.py").write_text("raise ImportError")
    monkeypatch.setattr(state, "__path__", [*state.__path__, str(tmp_path)])
    observer_classes.cache_clear()
    try:
        names = [kind.__name__ for kind in observer_classes()]
        assert (
            names.index("RecurrentHistory") < names.index("Newcomer") < names.index("EvictionState")
        )
        facts = Facts("toy", 8, 64)
        for tables in ({}, {"newcomer": {}}):
            found = observer_factories(ModelParts(facts, tables, (), ("step",), None, None))
            assert [type(f.open(2)).__name__ for f in found] == ["Newcomer"] * len(tables)
    finally:
        observer_classes.cache_clear()


def test_every_observer_says_when_it_is_needed():
    assert all("for_model" in vars(kind) for kind in observer_classes())
    assert len({kind.order for kind in observer_classes()}) > 5


def test_a_session_knows_no_observer_by_name_but_those_of_modes():
    """Which are what a caller asks for: to encode, to edit, to write over."""
    named = {kind for kind in observer_classes() if kind.__name__ in getsource(session_module)}
    assert {kind.__module__.split(".")[-2] for kind in named} == {"modes"}
    assert not [kind for kind in observer_classes() if kind.__name__ in getsource(core)]
