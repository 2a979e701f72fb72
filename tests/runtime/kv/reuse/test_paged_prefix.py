"""paged-prefix: sessions over shared blocks hold what dense sessions do, and give back what they take."""

import gc
import threading

import numpy as np
import pytest
import torch

import accel
from accel.compiler.pipeline import pipeline
from accel.ir.encoder import EncoderFacts
from accel.ir.errors import AccelError, PassError, RecipeError
from accel.passes import run
from accel.passes.check import NumericCheck
from accel.passes.kv._shared.paged import Paged
from accel.passes.state.head import Head
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.kv.reuse.paged_prefix import PagedPrefix
from accel.runtime.serve.engine import Engine, Request
from accel.runtime.session.core import SessionCore
from accel.runtime.session.prompt.prefix_cache import PrefixCache

from ....prefill_case import built as made
from ....reuse_case import BLOCK, named, shared
from ....session_ways import close, variants

MODELS = ["llama", "mistral", "plain_latent"]


@pytest.fixture
def case(stateful):
    return shared(stateful)


@pytest.mark.parametrize("name", MODELS)
def test_a_known_prefix_gives_the_logits_of_recomputing(stateful, name):
    case = shared(stateful, name)
    tokens = case.tokens(2, 40)
    want = case.dense(2).run(tokens, [40, 23], last_only=True)
    for reused in (0, 36 + 20):
        with case.session(2) as session:
            close(session.run(tokens, [40, 23], last_only=True), want)
            assert session.stats["reused"] == reused and session.lengths.tolist() == [40, 23]
            assert session.stats["tokens"] == 63 - reused
            session.end_prompt()
    assert case.pool.stats["used"] == 0


@pytest.mark.parametrize("seed", range(4))
def test_anything_in_any_order_is_what_a_dense_session_does(case, seed):
    """Two rows with a common beginning; calls of any width, rewinds anywhere, forks, the end of prompts."""
    rng = np.random.default_rng(seed)
    common, other = case.tokens(1, 30), case.tokens(2, 30, seed=1)
    pairs = [(case.session(2), case.dense(2))]
    close_later = list(pairs)
    for _ in range(24):
        mine, dense = pairs[rng.integers(len(pairs))]
        deed = rng.integers(6)
        if deed == 0:
            mine.end_prompt()
        elif deed == 1:
            to = [int(rng.integers(0, n + 1)) for n in dense.lengths]
            mine.rewind(to), dense.rewind(to)
        elif deed == 2 and len(pairs) < 4:
            pairs.append((mine.fork(), dense.fork()))
            close_later.append(pairs[-1])
        elif deed == 3 and not dense.lengths.any():
            lengths = [int(rng.integers(1, 31)), int(rng.integers(0, 31))]
            given = np.repeat(common, 2, 0)
            close(
                mine.run(given, lengths, last_only=True), dense.run(given, lengths, last_only=True)
            )
        else:
            width = int(rng.integers(1, 9))
            if dense.lengths.max() + width > 120:
                continue
            given = other[:, :width] if rng.integers(2) else np.repeat(common[:, :width], 2, 0)
            close(mine.run(given), dense.run(given))
        assert mine.lengths.tolist() == dense.lengths.tolist()
    for mine, _ in close_later:
        mine.close()
    assert case.pool.stats["used"] == 0 and not case.pool._uses


def test_blocks_are_stored_once(case):
    """Blocks used are those of each row, less what rows share; slots hold the rest."""
    tokens = case.tokens(1, 30)
    sessions = [case.session() for _ in range(4)]
    for i, session in enumerate(sessions):
        given = np.concatenate([tokens, case.tokens(1, 9, seed=9 + i)], axis=1)
        session.run(given, last_only=True)
        session.end_prompt()
        assert (
            session.observer(PrefixCache).base.tolist() == [36]
            and session._core.backend.buffers()["kv.pos"].shape[1] == 3
        )
    rows, common = 4 * (39 // BLOCK), 30 // BLOCK
    assert case.pool.stats["used"] == rows - 3 * common
    assert case.pool.stats["bytes"] == (rows - 3 * common) * BLOCK * 2 * 2 * 2 * 10 * 4
    for session in sessions:
        session.close()


def test_a_full_pool_falls_back_to_slots(stateful):
    case = shared(stateful, blocks=3)
    tokens = case.tokens(1, 40)
    first, second = case.session(), case.session()
    for session in (first, second):
        dense = case.dense()
        dense.run(tokens[:, :30])
        session.run(tokens[:, :30] if session is first else tokens[:, 3:33])
        session.end_prompt()
    assert first.observer(PrefixCache).base.tolist() == [12] and second.observer(
        PrefixCache
    ).base.tolist() == [0]
    close(first.run(tokens[:, 30:]), dense.run(tokens[:, 30:]))
    first.close()
    second.close()
    assert case.pool.stats == {**case.pool.stats, "used": 0, "filled": 3}


def test_nobody_writes_a_block_that_others_use(case):
    tokens = case.tokens(1, 24)
    with case.session() as one:
        one.run(tokens, last_only=True)
        one.end_prompt()
        before = {n: a.copy() for n, a in case.pool.arrays.items()}
        used = list(one.observer(PrefixCache)._rows[0])
        with one.fork() as other, case.session() as third:
            third.run(tokens, last_only=True)
            for session, at in ((other, 10), (third, 9)):
                session.rewind(at)
                session.run(case.tokens(1, 20, seed=at))
                session.end_prompt()
            for name, array in case.pool.arrays.items():
                assert np.array_equal(array[used], before[name][used])


def test_other_tokens_before_a_block_are_another_prefix(case):
    """Negative control of the whole: the same tokens behind others must not be taken for known."""
    tokens = case.tokens(1, 24)
    other = tokens.copy()
    other[0, 1] = 3 + (other[0, 1] - 2) % (case.program.facts.vocab_size - 3)
    with case.session() as one:
        one.run(tokens, last_only=True)
        one.end_prompt()
    with case.session() as two:
        close(two.run(other, last_only=True), case.dense().run(other, last_only=True))
        assert two.stats["reused"] == 0


def test_a_wrong_table_is_caught(case):
    tokens = case.tokens(1, 24)
    with case.session() as one:
        one.run(tokens, last_only=True)
        one.end_prompt()
        table = one._core.backend.buffers()["table"].copy()
        table[0, 0] = table[0, 1]
        one._core.backend.put({"table": table})
        one._capacity = 0
        dense = case.dense()
        dense.run(tokens)
        with pytest.raises(AssertionError):
            close(one.run(tokens[:, :2]), dense.run(tokens[:, :2]))


def test_a_call_that_fails_leaves_all_as_it_was(case):
    tokens = case.tokens(1, 24)
    with case.session() as one:
        one.run(tokens, last_only=True)

    class Fails:
        def __init__(self, backend):
            self.backend, self.broken = backend, True

        def __getattr__(self, name):
            return getattr(self.backend, name)

        def step(self, *args):
            if self.broken:
                raise RuntimeError("out of luck")
            return self.backend.step(*args)

    session = case.session(wrap=Fails)
    with pytest.raises(RuntimeError, match="luck"):
        session.run(tokens, last_only=True)
    assert session.length == 0 and case.pool.stats["used"] == 0
    session._core.backend.broken = False
    close(session.run(tokens, last_only=True), case.dense().run(tokens, last_only=True))
    session.close()


def test_a_session_that_is_dropped_lets_go_of_its_blocks(case):
    tokens = case.tokens(1, 24)
    session = case.session()
    session.run(tokens, last_only=True)
    session.end_prompt()
    assert case.pool.stats["used"] == 6
    del session
    gc.collect()
    assert case.pool.stats["used"] == 0


def test_an_answer_is_the_next_prompts_prefix(case):
    tokens = case.tokens(1, 40)
    with case.session() as one:
        one.run(tokens[:, :20], last_only=True)
        one.end_prompt()
        for i in range(20, 33):
            one.run(tokens[:, i : i + 1])
    with case.session() as two:
        two.run(tokens, last_only=True)
        assert two.stats["reused"] == 32


@pytest.fixture(scope="module")
def built(build):
    model = build("llama").model
    made = accel.optimize(
        model, {"kv.reuse": {"use": "paged-prefix"}}, max_context=256, max_batch=4
    )
    yield made
    made.close()


@pytest.mark.long
def test_an_artifact_gives_the_models_tokens(build, built):
    plain = build("llama").compiled
    tokens = np.random.default_rng(0).integers(3, plain.facts.vocab_size, (3, 70))
    prompts = [tokens[0].tolist(), tokens[1, :40].tolist(), [*tokens[0, :50].tolist(), 5, 6, 7]]
    want = plain.generate(prompts, 12, eos=[]).tokens
    for _, model in variants(built):
        first, second = model.generate(prompts, 12, eos=[]), model.generate(prompts, 12, eos=[])
        assert first.tokens == second.tokens == want
        assert second.stats["reused"] == 64 + 32 + 48
        assert model.pool["used"] == 0 < model.pool["filled"]
    assert plain.pool is None and built.report["grade"] == "distribution-exact"


def test_threads_share_a_pool(build, built):
    plain = build("llama").compiled
    tokens = np.random.default_rng(1).integers(3, plain.facts.vocab_size, (4, 60))
    tokens[:, :33] = tokens[0, :33]
    want = [plain.generate(row.tolist(), 6, eos=[]).tokens for row in tokens]
    got: dict[int, list] = {}

    def work(i):
        got[i] = [built.generate(row.tolist(), 6, eos=[]).tokens for row in tokens]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(3)] == [want] * 3 and built.pool["used"] == 0


def test_the_check_after_the_pass_sees_wrong_blocks(captured, monkeypatch):
    check = NumericCheck(captured("llama"))
    steps = pipeline(recipe_passes=[Paged()])
    steps = steps[: 2 + next(i for i, s in enumerate(steps) if isinstance(s, Head))]
    assert isinstance(steps[-1], Paged) and run(captured("llama"), steps, check)
    right = Paged._pool

    def late(self, program, editor, old, letters):
        """Each head reads another one's blocks."""
        made = right(self, program, editor, old, letters)
        with editor.graph.inserting_after(editor.graph.find_nodes(op="placeholder")[-1]):
            return editor.call(torch.ops.aten.roll.default, made, [1], [1])

    monkeypatch.setattr(Paged, "_pool", late)
    with pytest.raises(AccelError, match="Paged changed"):
        run(captured("llama"), steps, check)


@pytest.mark.parametrize(("name", "reason"), [("bloom", "bias by position"), ("opt", "encoder")])
def test_models_that_cannot_are_refused(stateful, name, reason):
    program = stateful(name)
    if reason == "encoder":
        program.facts.encoder = EncoderFacts(30, 20)
    with pytest.raises(PassError, match=reason):
        Paged().run(program)


def test_a_layer_that_is_left_out_is_refused(build):
    recipe = {"kv.reuse": {"use": "paged-prefix"}, "depth": {"use": "calm"}}
    with pytest.raises(AccelError) as caught:
        accel.optimize(build("llama").model, recipe, target="eager", verify=False)
    assert named(str(caught.value), "depth", "kv.reuse", "leave")


def test_options_that_mean_nothing_are_refused():
    for options in ({"block": 0}, {"blocks": -1}):
        with pytest.raises(RecipeError, match="blocks? is .*; give 1 to "):
            PagedPrefix(**options)


def test_steppers_share_blocks_and_nothing_else(case):
    with case.session() as one:
        one.run(case.tokens(1, 26), last_only=True)
        one.end_prompt()
        with one.fork() as other:
            mine, theirs = one._core.backend._state, other._core.backend._state
            for name in mine:
                same = mine[name].data_ptr() == theirs[name].data_ptr()
                assert same == name.startswith(("pool.", "table")), name


ENGINE = {"kv.reuse": {"use": "paged-prefix", "block": BLOCK, "blocks": 256}}
SCHEDULES = {"whole": {}, "chunks": {"schedule": {"use": "sarathi", "tokens": 7}}}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_requests_of_one_beginning_compute_it_once(schedule, monkeypatch):
    """Of the engine: a beginning of six blocks, before 5 tokens of each request's own, which get the tokens that they
    get without blocks. The control: other beginnings are computed.
    """
    model, plain = made("llama", tables=ENGINE | SCHEDULES[schedule]), made("llama")
    rng = np.random.default_rng(8)
    system = rng.integers(3, 50, (2, 24))
    prompts = [np.concatenate([system[int(i == 3)], rng.integers(3, 50, 5)]) for i in range(4)]
    params, ran = SamplingParams(max_tokens=6, ignore_eos=True), []
    want = [plain.generate(p.tolist(), sampling_params=params).tokens[0] for p in prompts]
    right = SessionCore.count
    monkeypatch.setattr(
        SessionCore, "count", lambda self, *a: (ran.append(a[1]), right(self, *a))[1]
    )
    with Engine(model) as engine:
        assert "share calls" in engine.how and ("in chunks" in engine.how) == (schedule == "chunks")
        tickets = [engine.submit(Request(prompt, params)) for prompt in prompts]
        assert [[event.token for event in ticket] for ticket in tickets] == want
        assert engine.stats["reused_tokens_total"] == 2 * 24
    assert sum(ran) == sum(p.size for p in prompts) + 4 * 5 - 2 * 24
    assert model.pool["used"] == 0


def test_a_row_that_joins_brings_its_table():
    """And its own slots, not the blocks that both use."""
    model = made("llama", tables=ENGINE)
    tokens = np.random.default_rng(5).integers(3, 50, (2, 30))
    tokens[1, :24] = tokens[0, :24]
    one, other = sessions = [model.session() for _ in range(2)]
    for row, session in enumerate(sessions):
        session.prompt(tokens[row : row + 1])
    one.join(other)
    first, second = one.observer(PrefixCache)._rows
    assert first[:6] == second[:6] and model.pool["used"] == len({*first, *second}) == 8
    buffers = one._core.backend.buffers()
    assert buffers["table"].tolist() == [first, second]
    assert (buffers["kv.pos"] >= 0).sum(1).tolist() == [2, 2]
    one.close()
    assert model.pool["used"] == 0
