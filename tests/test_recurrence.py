"""Recurrent state: laws of the operators, forms at capture, and sessions that rewind it."""

import warnings

import models
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import accel
import accel.ir.capture.forms
from accel.ir.capture.capture import capture
from accel.ir.capture.inspect import inspect
from accel.ir.errors import CaptureError, PassError
from accel.ir.ops import recurrence
from accel.passes.check import NumericCheck
from accel.passes.state.cache import Cache, mixes_tokens
from accel.runtime.session import core
from accel.runtime.session.session import Session
from accel.runtime.session.state import recurrent_history as past

from .op_cases import CASES, randn
from .session_ways import close

STATEFUL = (
    "conv-4",
    "conv-2",
    "scan",
    "scan-plain",
    "wkv",
    "peak",
    "linear-6-6",
    "linear-2-2",
    "delta-6-2",
    "dplr",
)
VOCAB = 97


# Operators


def split_run(op, operands: list, cuts: list[int], padded: bool = True) -> tuple[Tensor, ...]:
    """An operator over its tokens in several calls, each with a column of padding after it."""
    per_token = [i for i, x in enumerate(operands[:-2]) if is_per_token(operands, i)]
    state, parts = operands[-2], []
    for start, end in zip(cuts, cuts[1:], strict=False):
        given = list(operands)
        for i in per_token:
            given[i] = torch.cat(
                (operands[i][:, start:end], torch.ones_like(operands[i][:, :1])), 1
            )
        positions = torch.arange(start, end + 1).repeat(len(state), 1)
        positions[:, -1] = -1 if padded else end
        given[-2:] = [state, positions]
        *values, state = op(*given)
        parts.append([y[:, :-1] for y in values])
    return *(torch.cat(part, dim=1) for part in zip(*parts, strict=True)), state


def is_per_token(operands: list, i: int) -> bool:
    x, first = operands[i], operands[0]
    return isinstance(x, Tensor) and x.dim() > 1 and x.shape[:2] == first.shape[:2]


@pytest.mark.parametrize("name", STATEFUL)
def test_calls_carry_on_where_the_last_one_stopped(name):
    case = CASES[name]
    operands = case.operands((3, 11, 40))
    operands[-1] = torch.arange(11).repeat(3, 1)
    want = case.op(*operands)
    got = split_run(case.op, operands, [0, 1, 2, 7, 11])
    torch.testing.assert_close(got, tuple(want))
    spoilt = split_run(case.op, operands, [0, 1, 2, 7, 11], padded=False)
    assert not torch.allclose(spoilt[-1], want[-1]), "padding that counts as a token is seen"


@pytest.mark.parametrize("name", STATEFUL)
def test_ragged_rows_end_where_they_would_alone(name):
    case = CASES[name]
    operands = case.operands((3, 8, 40))
    lengths = [8, 3, 0]
    operands[-1] = torch.where(
        torch.arange(8) < torch.tensor(lengths)[:, None], torch.arange(8), -1
    )
    *values, after = case.op(*operands)
    for row, n in enumerate(lengths):
        alone = [
            x[row : row + 1, :n] if is_per_token(operands, i) else x for i, x in enumerate(operands)
        ]
        alone[-2:] = [operands[-2][row : row + 1], torch.arange(n)[None]]
        if n == 0:
            assert torch.equal(after[row], operands[-2][row])
            continue
        want = case.op(*alone)
        got = (*(y[row : row + 1, :n] for y in values), after[row : row + 1])
        torch.testing.assert_close(got, tuple(want))


def test_the_convolution_is_torchs():
    rng = np.random.default_rng(1)
    x, layer = randn(rng, 2, 9, 6), nn.Conv1d(6, 6, 4, groups=6, padding=3)
    got, _ = recurrence.causal_conv(x, layer.weight.squeeze(1), layer.bias, None, None)
    torch.testing.assert_close(got, layer(x.transpose(1, 2))[..., :9].transpose(1, 2))


def decayed(decay: Tensor) -> Tensor:
    """exp(sum of decay[s+1..t]) for s <= t, else 0: [..., T, T] of [..., T]."""
    total = decay.cumsum(-1)
    return (total[..., :, None] - total[..., None, :]).exp().tril()


def test_linear_attention_is_a_masked_product():
    rng = np.random.default_rng(2)
    q, k, v = randn(rng, 2, 8, 3, 4), randn(rng, 2, 8, 3, 4), randn(rng, 2, 8, 3, 5)
    decay = -randn(rng, 2, 8, 3).abs()
    scores = torch.einsum("bthd,bshd->bhts", q, k) * decayed(decay.transpose(1, 2))
    want = torch.einsum("bhts,bshe->bthe", scores, v)
    got, _ = recurrence.linear_attention(q, k, v, decay, None, None, None)
    torch.testing.assert_close(got, want)


def test_the_selective_scan_is_linear_attention_per_channel():
    rng = np.random.default_rng(3)
    x, step, b, c = randn(rng, 2, 8, 5), randn(rng, 2, 8, 5).abs(), randn(rng, 2, 8, 1), None
    c, a = randn(rng, 2, 8, 1), -randn(rng, 1, 5).abs()
    scores = (c @ b.transpose(1, 2))[:, None] * decayed((a * step).transpose(1, 2))
    want = torch.einsum("bets,bse->bte", scores, x)
    torch.testing.assert_close(recurrence.selective_scan(x, step, a, b, c, None, None)[0], want)


def test_the_delta_rule_is_transformers():
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    rng = np.random.default_rng(4)
    q, k, v = (randn(rng, 2, 8, 3, d) for d in (4, 4, 5))
    decay, beta = -randn(rng, 2, 8, 3).abs(), torch.sigmoid(randn(rng, 2, 8, 3))
    want, after = torch_recurrent_gated_delta_rule(q, k, v, decay, beta, None, True)
    got = recurrence.linear_attention(q / 4**0.5, k, v, decay, beta, None, None)
    torch.testing.assert_close(got, (want, after))


def test_a_transition_of_low_rank_is_a_product_of_matrices():
    """And the delta rule, where what is erased is what the key finds."""
    rng = np.random.default_rng(5)
    q, k, erase, write = (0.5 * randn(rng, 2, 8, 3, 4) for _ in range(4))
    v, decay, state = randn(rng, 2, 8, 3, 5), -randn(rng, 2, 8, 3, 4).abs(), randn(rng, 2, 3, 4, 5)
    got, after = recurrence.dplr_attention(q, k, v, decay, erase, write, state, None)
    for t in range(8):
        change = torch.diag_embed(decay[:, t].exp()) + torch.einsum(
            "bhi,bhj->bhij", write[:, t], erase[:, t]
        )
        state = change @ state + torch.einsum("bhi,bhj->bhij", k[:, t], v[:, t])
        torch.testing.assert_close(got[:, t], torch.einsum("bhi,bhij->bhj", q[:, t], state))
    torch.testing.assert_close(after, state)
    beta, k = torch.sigmoid(randn(rng, 2, 8, 3)), torch.nn.functional.normalize(k, dim=-1)
    want = recurrence.linear_attention(q, k, v, decay, beta, None, None)
    rate = beta[..., None]
    found = recurrence.dplr_attention(q, rate * k, v, decay, k * decay.exp(), -rate * k, None, None)
    torch.testing.assert_close(found, want)


# The whole way


def mamba() -> nn.Module:
    """No attention at all."""
    return models.random(
        "mamba",
        vocab_size=VOCAB,
        hidden_size=24,
        state_size=6,
        num_hidden_layers=2,
        time_step_rank=5,
    )


def lfm2() -> nn.Module:
    """Short convolutions and attention in turn."""
    return models.random(
        "lfm2", vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, block_multiple_of=8,
        layer_types=["conv", "full_attention", "conv"],
    )  # fmt: skip


def falcon_h1() -> nn.Module:
    """Mamba-2 and attention side by side in every layer."""
    return models.random(
        "falcon_h1", vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, mamba_d_ssm=64, mamba_n_heads=8,
        mamba_d_head=8, mamba_n_groups=2, mamba_d_state=6, mamba_chunk_size=8,
    )  # fmt: skip


MODELS = {f.__name__: f for f in (mamba, lfm2, falcon_h1)}


@pytest.fixture(scope="module")
def built():
    """built(name) -> tokens [3,40], their logits by transformers, and the ONNX build."""
    made = {}

    def get(name: str):
        if name not in made:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = MODELS[name]()
                compiled = accel.optimize(model, max_context=64, max_batch=3)
            ids = np.random.default_rng(5).integers(0, VOCAB, (3, 40))
            with torch.no_grad():
                want = model(torch.from_numpy(ids), use_cache=False).logits.numpy()
            made[name] = ids, want, compiled
        return made[name]

    yield get
    for _, _, compiled in made.values():
        compiled.close()


def converse(live: Session, ids: np.ndarray, want: np.ndarray) -> None:
    """Prefill, 16 single tokens, a rewind of each row to another length, ragged calls."""
    close(live.run(ids[:, :9]), want[:, :9])
    for i in range(9, 25):
        close(live.run(ids[:, i : i + 1])[:, 0], want[:, i])
    starts, counts = [3, 11, 20], [5, 4, 0]
    live.rewind(starts)
    for counts in ([5, 4, 0], [0, 3, 3], [2, 2, 2]):
        width = max(counts)
        tokens = np.stack([row[s : s + width] for row, s in zip(ids, starts, strict=True)])
        got = live.run(tokens, lengths=counts)
        for row, (start, n) in enumerate(zip(starts, counts, strict=True)):
            close(got[row, :n], want[row, start : start + n])
        starts = [s + n for s, n in zip(starts, counts, strict=True)]
    assert live.lengths.tolist() == starts


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_session_gives_transformers_logits(built, name):
    ids, want, compiled = built(name)
    with compiled.session(3) as live:
        converse(live, ids, want)


def test_long_prompts_carry_their_state_over_chunks(built, monkeypatch):
    monkeypatch.setattr(core, "CHUNK", 7)
    monkeypatch.setattr(core, "STEP", 5)
    ids, want, compiled = built("falcon_h1")
    with compiled.session(3) as live:
        converse(live, ids, want)
        live.rewind(0)
        close(live.run(ids), want)


@pytest.mark.long
def test_a_fork_goes_its_own_way(built):
    ids, want, compiled = built("mamba")
    with compiled.session(3) as live:
        live.run(ids[:, :12])
        with live.fork() as other:
            other.rewind([2, 12, 7])
            close(live.run(ids[:, 12:20]), want[:, 12:20])
            tokens = np.stack([row[s : s + 5] for row, s in zip(ids, [2, 12, 7], strict=True)])
            got = other.run(tokens)
            for row, start in enumerate([2, 12, 7]):
                close(got[row], want[row, start : start + 5])
        close(live.run(ids[:, 20:]), want[:, 20:])


def test_a_rewind_says_what_it_costs(built):
    ids, _, compiled = built("mamba")
    with compiled.session(3) as live:
        assert not live.capabilities.free_rewind
        live.run(ids[:, :10])
        live.run(ids[:, 10:20])
        before = live.stats["tokens"]
        live.rewind(12)
        live.run(ids[:, 12:13])
        assert live.stats["tokens"] - before == 3 * (2 + 1), "two tokens since the copy, one new"


def test_a_failed_call_leaves_the_state_as_it_was(built, monkeypatch):
    monkeypatch.setattr(core, "CHUNK", 4)
    ids, want, compiled = built("mamba")
    with compiled.session(3) as live:
        live.run(ids[:, :6])
        step, calls = live._core.backend.step, []

        def fails(*given):
            calls.append(1)
            if len(calls) == 2:
                raise MemoryError
            return step(*given)

        monkeypatch.setattr(live._core.backend, "step", fails)
        with pytest.raises(MemoryError):
            live.run(ids[:, 20:32])
        assert len(calls) == 2 and live.length == 6
        close(live.run(ids[:, 6:12]), want[:, 6:12])


class Broken:
    """A backend session that passes everything on; subclasses spoil one thing."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class NeverGoesBack(Broken):
    def restore(self, snapshot, rows):
        pass


class PaddingIsReal(Broken):
    def step(self, tokens, positions, slots, rows, want=(), tree=None, embeds=None):
        return self.inner.step(tokens, np.abs(positions), slots, rows)


class TakesNoTurns(Broken):
    def step(self, tokens, positions, slots, rows, want=(), tree=None, embeds=None):
        out = self.inner.step(tokens, positions, slots, rows)
        self.inner._swap()
        return out


@pytest.mark.parametrize("spoilt", [NeverGoesBack, PaddingIsReal, TakesNoTurns])
def test_a_broken_stepper_is_caught(built, spoilt):
    ids, want, compiled = built("mamba")
    backend = spoilt(compiled._sessions.backend.open_session(3))
    with Session(backend, 3, [past.RecurrentHistory(3)], vocab_size=VOCAB, max_context=64) as live:
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            converse(live, ids, want)


def test_copies_of_the_state_are_few(built, monkeypatch):
    monkeypatch.setattr(past, "SNAPSHOTS", 3)
    ids, want, compiled = built("mamba")
    with compiled.session(3) as live:
        for i in range(0, 40, 2):
            close(live.run(ids[:, i : i + 2]), want[:, i : i + 2])
        assert len(live.observer(past.RecurrentHistory)._saved) == 3
        live.rewind(5)
        close(live.run(ids[:, 5:9]), want[:, 5:9])


# Facts, state and refusals


def test_layers_say_what_they_carry(built):
    _, _, compiled = built("lfm2")
    layers = compiled.facts.layers
    assert [x.attention for x in layers] == ["recurrent", "causal", "recurrent"]
    assert [x.state_bytes for x in layers] == [4 * 2 * 32, 0, 4 * 2 * 32]
    assert len(compiled.program.step.graph.nodes) < 40, "layers are outlined"
    _, _, compiled = built("falcon_h1")
    kinds = [(x.attention, x.num_heads) for x in compiled.facts.layers]
    assert kinds == [("causal", 4)] * 2
    held = sum(4 * np.prod(s.shape[1:]) for s in compiled.program.state if s.role == "recurrent")
    assert held == sum(x.state_bytes for x in compiled.facts.layers)


def test_a_form_that_computes_something_else_is_caught(monkeypatch):
    forms = dict(accel.ir.capture.forms._known())
    right = forms["MambaMixer"]
    wrong = {**forms, "MambaMixer": lambda self, x, *a, **k: right(self, x) * 1.1}
    monkeypatch.setattr(accel.ir.capture.forms, "_known", lambda: wrong)
    with pytest.raises(CaptureError, match="differs from the module"):
        capture(mamba(), max_context=64)


def test_a_model_is_itself_again_after_its_capture():
    model = mamba()
    program = capture(model, max_context=64)
    assert not any("forward" in vars(m) for m in model.modules())
    assert mixes_tokens(program) is None
    check = NumericCheck(program)
    for node in program.nodes(recurrence.selective_scan.default):
        node.args = (*node.args[:2], node.args[2], node.args[4], node.args[3], *node.args[5:])
    with pytest.raises(PassError, match="changed what the program computes"):
        check(program, Cache())


def test_chunks_are_short_while_a_model_is_captured():
    model = falcon_h1()
    mixers = [m for m in model.modules() if hasattr(m, "chunk_size")]
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        want = model(tokens, use_cache=False).logits
        with accel.ir.capture.forms.short_chunks(model, inspect(model).swaps.chunked):
            assert {m.chunk_size for m in mixers} == {accel.ir.capture.forms.CHUNK}
            torch.testing.assert_close(
                model(tokens, use_cache=False).logits, want, atol=1e-4, rtol=1e-4
            )
    assert {m.chunk_size for m in mixers} == {8}


class Running(nn.Module):
    """A mean over all tokens so far: a recurrence that accel does not know."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.tokens(tokens).cumsum(1))
        return out


def test_an_unknown_recurrence_is_refused():
    with pytest.raises(PassError, match="Nearest miss|mixes tokens"):
        accel.optimize(Running(), max_context=32)
