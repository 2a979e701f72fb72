"""paged-prefix over recurrent state: rows go on from snapshots, and hold what dense sessions do."""

import numpy as np
import pytest

import accel
from accel.compiler.smoke.tiny_models import small_model
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.serve.engine import Engine, Request
from accel.runtime.session.prompt import prefix_cache
from accel.runtime.session.prompt._pool import Snapshot
from accel.runtime.session.prompt.prefix_cache import PrefixCache

from ....reuse_case import BLOCK, shared
from ....session_ways import close

MODELS = ["jamba", "mamba", "lfm2"]  # attention in turn with recurrences, none, with convolutions


@pytest.fixture
def case(stateful):
    return shared(stateful, "jamba")


def prompted(case, tokens, reused):
    """A prompt [1,n] in a session of its own, which has the logits of recomputing: the session, closed."""
    with case.session() as session:
        close(
            session.prompt(tokens),
            case.dense().run(tokens, last_only=True),
        )
        assert session.stats["reused"] == reused
        assert session.stats["tokens"] == tokens.size - reused
    return session


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_row_goes_on_behind_the_end_of_an_earlier_prompt(stateful, name):
    case = shared(stateful, name)
    tokens = case.tokens(1, 40)
    prompted(case, tokens[:, :22], 0)
    prompted(case, tokens, 22)
    prompted(case, tokens[:, :30], 22)
    assert case.pool.stats["used"] == 0 and case.pool.stats["snapshots"] >= 3


def test_a_row_goes_on_behind_the_end_of_an_earlier_answer(case):
    tokens = case.tokens(1, 40)
    with case.session() as session:
        session.prompt(tokens[:, :10])
        for i in range(10, 21):
            session.run(tokens[:, [i]])
    prompted(case, tokens, 21)


@pytest.mark.parametrize("name", ["lfm2", "mamba"])
def test_the_check_of_a_build_takes_state_back_to_the_end_of_the_block(name):
    """It runs the tokens behind a block twice: where the block lies in the row, and in the pool."""
    model = small_model(name)
    with accel.optimize(model, "paged-prefix", target="eager", max_context=64) as built:
        prompts = [[5, 6, 7] * 8, [5, 6, 7] * 8 + [9]]
        texts = [built.generate([prompt], max_new_tokens=4, eos=[]).tokens for prompt in prompts]
    with accel.optimize(model, "base", target="eager", max_context=64, verify=False) as plain:
        assert texts == [plain.generate([p], max_new_tokens=4, eos=[]).tokens for p in prompts]


def test_an_answer_that_was_taken_back_leaves_no_snapshot(case):
    """Its state is behind other tokens than the row holds."""
    tokens = case.tokens(1, 40)
    with case.session() as session:
        session.prompt(tokens[:, :10])
        session.run(np.concatenate([tokens[:, 10:14], tokens[:, :3]], 1))
        session.rewind(14)
    prompted(case, tokens, 10)


def test_where_prompts_part_the_third_goes_on(case):
    system, own = case.tokens(1, 21), case.tokens(3, 9, seed=2)
    known = 21 // BLOCK * BLOCK
    for mine, reused in zip(own, (0, 0, known), strict=True):
        prompted(case, np.concatenate([system, mine[None]], 1), reused)


def test_long_prompts_leave_snapshots_on_their_way(case, monkeypatch):
    monkeypatch.setattr(prefix_cache, "EVERY", 16)
    monkeypatch.setattr("accel.runtime.session.core.CHUNK", 12)
    tokens, other = case.tokens(1, 60), case.tokens(1, 60, seed=3)
    prompted(case, tokens, 0)
    prompted(case, np.concatenate([tokens[:, :50], other], 1), 48)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(2))
def test_anything_in_any_order_is_what_a_dense_session_does(stateful, name, seed, monkeypatch):
    """Two rows; prompts with a common beginning, calls of any width, rewinds anywhere, forks, rows that end."""
    monkeypatch.setattr(prefix_cache, "EVERY", 12)
    case, rng = shared(stateful, name), np.random.default_rng(seed)
    common, other = case.tokens(1, 30), case.tokens(2, 30, seed=1)
    pairs, reused = [], 0.0
    for _ in range(40):
        if not pairs or rng.integers(5) == 0:
            mine, dense = case.session(2), case.dense(2)
            given = np.repeat(common, 2, 0)
            if rng.integers(2):
                given[:, 20:] = other[:, :10]
            lengths = rng.integers(2, 31, 2).tolist()
            close(mine.prompt(given, lengths), dense.prompt(given, lengths))
            reused += mine.stats["reused"]
            pairs.append((mine, dense))
            continue
        index = int(rng.integers(len(pairs)))
        mine, dense = pairs[index]
        deed = rng.integers(6)
        if deed == 0:
            mine.end_prompt()
        elif deed == 1:
            to = [int(rng.integers(0, n + 1)) for n in dense.lengths]
            mine.rewind(to), dense.rewind(to)
        elif deed == 2 and len(pairs) < 5:
            pairs.append((mine.fork(), dense.fork()))
        elif deed == 3:
            mine.select([1, 0]), dense.select([1, 0])
        elif deed == 4:
            for one in pairs.pop(index):
                one.close()
            continue
        elif dense.lengths.max() < 100:
            width = int(rng.integers(1, 9))
            given = other[:, :width] if rng.integers(2) else np.repeat(common[:, :width], 2, 0)
            close(mine.run(given), dense.run(given))
        assert mine.lengths.tolist() == dense.lengths.tolist()
    for mine, _ in pairs:
        mine.close()
    assert case.pool.stats["used"] == 0 and reused > 0


def test_a_snapshot_of_another_state_is_caught(case, monkeypatch):
    keep = type(case.pool).keep

    def spoilt(self, before, snapshot):
        state = {name: array + 1 for name, array in snapshot.state.items()}
        keep(self, before, Snapshot(snapshot.tokens, snapshot.parts, state))

    monkeypatch.setattr(type(case.pool), "keep", spoilt)
    tokens = case.tokens(1, 40)
    prompted(case, tokens[:, :22], 0)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        prompted(case, tokens, 22)


def test_snapshots_stay_within_their_bytes(case):
    """The one that went unused for longest goes first; one that is larger than all is not held."""
    prompts = [case.tokens(1, 14, seed=i) for i in range(4)]
    prompted(case, prompts[0], 0)
    each = case.pool.stats["snapshot_bytes"]
    case.pool.state_bytes = 2 * each
    for prompt in prompts[1:]:
        prompted(case, prompt, 0)
        longer = np.concatenate([prompts[0], prompts[0][:, :5]], 1)
        with case.session() as session:
            assert session.reuse(longer).tolist() == [14], "it was used lately"
    assert case.pool.stats["snapshots"] == 2 and case.pool.stats["snapshot_bytes"] <= 2 * each
    case.pool.state_bytes = each - 1
    prompted(case, case.tokens(1, 14, seed=9), 0)
    assert case.pool.stats["snapshot_bytes"] <= 2 * each


def test_a_snapshot_goes_with_the_block_that_it_is_behind(stateful):
    case = shared(stateful, "jamba", blocks=3)
    for seed in range(3):
        prompted(case, case.tokens(1, 14, seed=seed), 0)
        assert case.pool.stats["snapshots"] == 1
    prompted(case, case.tokens(1, 20, seed=2), 14)


def test_rows_that_leave_leave_what_they_held(case):
    tokens = case.tokens(2, 40)
    with case.session(2) as session:
        session.prompt(tokens[:, :10])
        session.run(tokens[:, 10:15])
        session.leave(0)
        prompted(case, tokens[:1], 15)
        prompted(case, tokens[1:], 10)


def test_a_prompt_that_fails_leaves_nothing(case):
    class Fails:
        def __init__(self, backend):
            self.backend, self.broken = backend, True

        def __getattr__(self, name):
            return getattr(self.backend, name)

        def step(self, *args):
            if self.broken:
                raise RuntimeError("out of luck")
            return self.backend.step(*args)

    tokens = case.tokens(1, 40)
    prompted(case, tokens[:, :22], 0)
    session = case.session(wrap=Fails)
    with pytest.raises(RuntimeError, match="luck"):
        session.prompt(tokens)
    assert session.length == 0 and case.pool.stats["used"] == 0
    session._core.backend.broken = False
    close(session.prompt(tokens), case.dense().run(tokens, last_only=True))
    session.close()


@pytest.fixture(scope="module")
def built():
    """The small Jamba with blocks and without."""
    module, sizes = small_model("jamba"), {"max_context": 128, "max_batch": 3, "verify": False}
    tables = {"kv.reuse": {"use": "paged-prefix", "block": BLOCK, "blocks": 256}}
    found = [accel.optimize(module, recipe, target="eager", **sizes) for recipe in (tables, "base")]
    yield found
    for one in found:
        one.close()


def test_turns_on_the_server_run_what_is_new(built):
    """Two conversations at once, which get the tokens that they get alone without blocks; seeded, too."""
    model, plain = built
    rng = np.random.default_rng(4)
    texts = rng.integers(3, 101, (2, 23)).tolist()
    for turn in range(3):
        params = [
            SamplingParams(max_tokens=6, ignore_eos=True, temperature=t, seed=7) for t in (0, 1)
        ]
        with Engine(model) as engine:
            pairs = zip(texts, params, strict=True)
            tickets = [engine.submit(Request(np.array(text), one)) for text, one in pairs]
            answers = [[event.token for event in ticket] for ticket in tickets]
            reused = engine.stats["reused_tokens_total"]
        for text, one, answer in zip(texts, params, answers, strict=True):
            assert answer == plain.generate(text, sampling_params=one).tokens[0]
        if turn:  # all of the turns before but the last token, which was drawn and not run
            assert reused == sum(len(text) - 4 - 1 for text in texts)
        for text, answer in zip(texts, answers, strict=True):
            text += [*answer, *rng.integers(3, 101, 4).tolist()]
    assert model.pool["used"] == 0


def test_what_snapshots_take_is_told(built):
    model = built[0]
    with model.session() as session:
        session.prompt(np.random.default_rng(5).integers(3, 101, (1, 20)))
        session.run([[5, 6]])
        state = sum(layer.state_bytes for layer in model.facts.layers)
        told = session.stats
        assert told["snapshots"] >= 1 and told["snapshot_seconds"] > 0
        assert told["snapshot_bytes"] % state == 0 and told["snapshot_bytes"] >= state
        assert model.pool["snapshot_bytes"] > state


def test_a_reply_tells_of_snapshots(built):
    model, text = built[0], np.random.default_rng(8).integers(3, 101, 20).tolist()
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    told = model.generate([text, text[:9]], sampling_params=params).stats["snapshots"]
    state = sum(layer.state_bytes for layer in model.facts.layers)
    assert told["taken"] >= 1 and told["seconds"] > 0 and told["bytes"] % (2 * state) == 0


def test_edits_run_the_tokens_behind_them(built):
    model, plain = built
    ids = np.random.default_rng(6).integers(3, 101, 30).tolist()
    edits = [(10, 14, [5, 6]), (0, 3, []), (25, 25, [7, 8, 9]), (20, 30, []), (4, 4, [])]
    for start, stop, new in edits:
        with model.session(2) as session, plain.session() as anew:
            session.prompt([ids, ids[::-1]])
            got = session.edit(start, stop, new, row=1)
            want = ids[::-1][:start] + new + ids[::-1][stop:]
            close(got[1:], anew.run([want])[:, -1:])
            assert not got[0].any() and session.lengths.tolist() == [30, len(want)]
    with model.session() as session:
        session.prompt([ids])
        with pytest.raises(accel.InputError, match="use rewind"):
            session.edit(0, 30, [])


def test_an_edit_that_fails_changes_nothing(built, monkeypatch):
    model, plain = built
    ids = np.random.default_rng(7).integers(3, 101, 30).tolist()
    with model.session() as session, plain.session() as anew:
        session.prompt([ids])
        with monkeypatch.context() as broken:
            backend = type(session._core.backend)
            broken.setattr(backend, "step", lambda *a, **k: (_ for _ in ()).throw(MemoryError()))
            with pytest.raises(MemoryError):
                session.edit(10, 14, [5, 6])
        assert session.length == 30
        close(session.run([[4]]), anew.run([[*ids, 4]])[:, -1:])
    assert session.observer(PrefixCache) is not None
