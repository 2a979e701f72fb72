"""pause (arXiv:2310.02226): prompts with pauses behind them are what transformers' own model does with the same
embeddings; no pause follows, and what goes by tokens sees none.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from accel.compiler.over_state import over_state
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs.pause import Paused, PauseRun
from accel.ir.capture.capture import capture
from accel.ir.errors import InputError, PassError, RecipeError
from accel.passes.state.extra_ids import ROWS, check
from accel.passes.trained import ALL, first_product, write
from accel.runtime.decode.row import Row
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.loop import chosen
from accel.runtime.model.chat import Chat
from accel.runtime.prompt.pause import Pause
from accel.runtime.serve.engine import Engine, Request

from ...prefill_case import CONTEXT, LENGTHS, TOKENS, built, far, module
from ...session_ways import variants

M, NEW = 3, 10
PROMPTS = [row[:n] for row, n in zip(TOKENS, LENGTHS, strict=True)]
AGAIN = np.array(
    [5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 8]
)  # a drafter by its text would draft what comes behind
DRAFTS = {
    "prompt-lookup": {"draft": {"use": "prompt-lookup"}},
    "suffix-tree": {"draft": {"use": "suffix-tree", "tree": False}},
    "sam": {"draft": {"use": "sam"}},
    "aded": {"draft": {"use": "aded"}},
    "rest": {"draft": {"use": "rest", "least": 1}},
    "token-recycling": {"draft": {"use": "token-recycling"}},
    "stand": {"draft": {"use": "stand"}},
    "jacobi": {"loop": {"use": "jacobi"}},
    "lookahead": {"loop": {"use": "lookahead"}},
    "fastcot": {"loop": {"use": "fastcot"}},
}


@pytest.fixture(scope="module")
def part(tmp_path_factory):
    """A part of random numbers, and its embedding [1,E]."""
    program = built("llama").program
    width = module("llama").get_input_embeddings().weight.shape[1]
    rows = torch.randn(1, width, generator=torch.Generator().manual_seed(0))
    file = tmp_path_factory.mktemp("pause") / "pause.safetensors"
    write(Pause(), file, {ALL: {ROWS: rows}}, first_product(program, program.step), {})
    return file, rows


@pytest.fixture(scope="module")
def tables(part):
    return {"prompt": {"use": "pause", "trained": str(part[0]), "pauses": M}}


@pytest.fixture
def model(tables):
    return built("llama", tables=tables)


@torch.no_grad()
def oracle(rows, ids, after=(), name="llama"):
    """Logits [1+n,V] behind a prompt [T] and M pauses, and behind tokens [n] after it."""
    lookup = module(name).get_input_embeddings()
    parts = (
        lookup(torch.tensor(ids)),
        rows.expand(M, -1),
        lookup(torch.tensor(list(after), dtype=torch.int64)),
    )
    return module(name)(inputs_embeds=torch.cat(parts)[None]).logits[0, len(ids) + M - 1 :].numpy()


def law(model, rows):
    """Prompts of several lengths together, greedy: each token is the likeliest of the oracle's logits."""
    out = model.generate(PROMPTS, NEW, eos=[], logprobs=1)
    for ids, tokens, logs in zip(PROMPTS, out.tokens, out.logprobs, strict=True):
        want = oracle(rows, ids, tokens[:-1]).astype(np.float64)
        assert tokens == want.argmax(1).tolist()
        want -= np.log(np.exp(want).sum(1, keepdims=True))
        got = [line[token].logprob for token, line in zip(tokens, logs, strict=True)]
        assert np.abs(np.array(got) - want.max(1)).max() < 1e-4
    assert out.stats["prompt_tokens"] == sum(ids.size + M for ids in PROMPTS)


def test_prompts_with_pauses_are_those_of_the_module(model, tables, part):
    law(model, part[1])
    for _, other in variants(built("llama", "onnx", tables=tables), None):
        law(other, part[1])
        assert other.facts.extra_ids.count == 1 and other.facts.vocab_size == model.facts.vocab_size


@pytest.mark.parametrize("broken", ["first", "fewer", "token"])
def test_the_law_catches(model, part, broken, monkeypatch):
    def wrong(self, prompt, vocab_size):
        pauses = np.full(M - (broken == "fewer"), 0 if broken == "token" else vocab_size)
        return np.concatenate([pauses, prompt] if broken == "first" else [prompt, pauses])

    monkeypatch.setattr(Pause, "read", wrong)
    with pytest.raises(AssertionError):
        law(model, part[1])


def test_tokens_are_read_as_before_and_no_pauses_are_the_model(model):
    plain = built("llama")
    none = built("llama", tables={"prompt": {"use": "pause", "trained": "missing", "pauses": 0}})
    assert str(none.program.step.graph) == str(plain.program.step.graph)
    assert none.facts.extra_ids is None
    assert none.generate(PROMPTS, NEW, eos=[]).tokens == plain.generate(PROMPTS, NEW, eos=[]).tokens
    assert np.array_equal(model.logits(TOKENS), plain.logits(TOKENS))


@pytest.mark.long
def test_weights_of_four_bits_read_pauses_as_others(tables, part):
    """The table of embeddings is quantised, too; the pause's is not."""
    four = {"weights": {"use": "int4"}}
    base, model = built("llama", "onnx", four), built("llama", "onnx", {**four, **tables})
    assert np.array_equal(base.logits(TOKENS), model.logits(TOKENS))
    with model.session() as session:
        ids = np.append(PROMPTS[2], [model.facts.vocab_size] * M)
        got = session.prompt(ids[None])[0]
    assert (
        far(got, oracle(part[1], PROMPTS[2]))
        < 0.3
        < far(got, base.logits(PROMPTS[2][None])[0, -1:])
    )


def test_a_prompt_in_parts_and_a_saved_one_go_on_alike(model, tmp_path):
    ids = np.append(PROMPTS[0], [model.facts.vocab_size] * M)
    with model.session() as session, model.session() as other:
        whole = session.run(ids[None])[:, -1]
        for part in np.split(ids, [10, 12, PROMPTS[0].size + 1]):
            last = other.run(part[None])[:, -1]
        assert far(last, whole) < 1e-5
        session.rewind(PROMPTS[0].size)  # the pauses go, and come again
        assert far(session.run(ids[None, PROMPTS[0].size :])[:, -1], whole) < 1e-5
    want = model.generate([PROMPTS[0]], NEW, eos=[]).tokens[0]
    with model.prompt_session(PROMPTS[0][:20]) as session:
        assert session.lengths == 20  # pauses come before an answer alone
        session.save(tmp_path / "saved")
        assert list(model.stream(PROMPTS[0][20:], NEW, eos=[], session=session)) == want
    with model.open_session(tmp_path / "saved") as session:
        assert list(model.stream(PROMPTS[0][20:], NEW, eos=[], session=session)) == want


def test_no_pause_follows(model):
    size = model.facts.vocab_size
    out = model.generate(PROMPTS * 4, 60, temperature=50.0, seed=1, eos=[])
    assert max(map(max, out.tokens)) < size
    assert model.logits(TOKENS).shape[2] == size
    with pytest.raises(InputError, match=f"{size}"):
        model.generate(PROMPTS, 1, logit_bias={size: 100.0})
    with pytest.raises(InputError, match=f"{size}"):
        model.generate(PROMPTS, 1, eos=[size])


def test_a_request_s_own_functions_and_penalties_see_no_pause(model, part):
    seen = []

    def processor(ids, logits):
        seen.append(ids.tolist())
        return logits

    ways = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    out = model.generate([PROMPTS[2]], NEW, logits_processors=[processor], eos=[], **ways)
    found = PROMPTS[2].tolist()
    for token, ids in zip(out.tokens[0], seen, strict=True):
        new = found[PROMPTS[2].size :]
        assert ids == found
        scores = oracle(part[1], PROMPTS[2], new)[-1].copy()
        there = sorted(set(found))
        scores[there] = np.where(scores[there] < 0, scores[there] * 1.3, scores[there] / 1.3)
        for one in set(new):
            scores[one] -= 0.5 + 0.5 * new.count(one)
        assert token == scores.argmax()
        found.append(token)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_change_no_token(name, tables, model):
    drafting = built("llama", tables={**tables, **DRAFTS[name]})
    prompts = [AGAIN, PROMPTS[1]]
    out = drafting.generate(prompts, 30, eos=[])
    assert out.tokens == model.generate(prompts, 30, eos=[]).tokens
    assert out.stats.get("drafted", 1) > 0


def test_the_law_of_drafts_catches_pauses_in_their_text(tables, monkeypatch):
    drafting = built("llama", tables={**tables, **DRAFTS["prompt-lookup"]})
    drafting.generate([AGAIN], NEW, eos=[])
    monkeypatch.setattr(Row, "text", Row.seen)
    ids = np.append(
        AGAIN, drafting.generate([AGAIN], 1, eos=[]).tokens[0]
    )  # what the first token will be
    with pytest.raises(InputError, match="drafted token"):
        drafting.generate([ids[-1:].repeat(1), ids], NEW, eos=[])


def test_an_engine_adds_them_and_scores_the_text_alone(model):
    makes = SamplingParams(max_tokens=NEW, ignore_eos=True)
    want = model.generate([PROMPTS[2]], sampling_params=makes).tokens[0]
    with Engine(model) as engine:
        ticket = engine.submit(Request(PROMPTS[2], makes, prompt_logprobs=0))
        assert [event.token for event in ticket] == want
        assert len(ticket.prompt_logprobs) == PROMPTS[2].size
        with pytest.raises(InputError, match="only a model's recipe adds"):
            engine.submit(Request([5, model.facts.vocab_size, 6], makes))


class Letters:
    """A tokenizer of numbers: messages become their numbers behind a 1, answers behind a 2."""

    special: frozenset = frozenset()

    def apply_chat_template(self, messages, **_):
        ids = []
        for message in messages:
            ids += [
                1 + (message["role"] == "assistant"),
                *map(int, filter(str.isdigit, message["content"].split())),
            ]
        return [*ids, 2]


class Answer:
    """A stream of numbers of a session, as the model's."""

    def __init__(self, model, session, ids):
        self.prompt = model._prompting.read(ids, model.facts.vocab_size)
        self.session, self.new = session, self.prompt.size - int(session.lengths[0])
        self.tokens, self.stats = [], {}

    def through(self, change):
        return change(self.pieces())

    def pieces(self):
        line = self.session.prompt(self.prompt[None, -self.new :])[0, -1]
        for _ in range(4):
            self.tokens.append(int(line.argmax()))
            yield f"{self.tokens[-1]} "
            if len(self.tokens) < 4:
                line = self.session.run([[self.tokens[-1]]])[0, -1]


def test_a_conversation_has_pauses_before_each_answer(model):
    answers = []

    def start(ids, _, session):
        answers.append(Answer(model, session, ids))
        return answers[-1]

    size = model.facts.vocab_size
    with Chat(Letters(), 120, model.session, start, size, template={}) as chat:
        texts = [list(chat.send(text)) for text in ("5 6 7", "8 9", "10")]
        held = answers[-1].prompt
        assert np.flatnonzero(held == size).tolist() == [
            place + k for place in _openings(held, size) for k in range(M)
        ]
        assert [one.new for one in answers] == [
            5 + M,
            1 + 4 + M,
            1 + 3 + M,
        ]  # what is new, and no more
        chat.undo()
        assert list(chat.send("10")) == texts[-1]


def _openings(ids, size):
    """The places behind each 2 that begins an answer, pauses among them counted."""
    return [i + 1 for i in range(ids.size - 1) if ids[i] == 2 and ids[i + 1] == size]


def test_bad_input(model, part, tables, tmp_path):
    size = model.facts.vocab_size
    with pytest.raises(InputError, match=f"has {CONTEXT - 1} tokens, and {CONTEXT - 1 + M}"):
        model.generate([np.ones(CONTEXT - 1, np.int64)], 1)
    for one, wrong in ((model, size + 1), (built("llama"), size)):
        with one.session() as session, pytest.raises(InputError, match=str(wrong)):
            session.run([[wrong]])
    short = tmp_path / "short.safetensors"
    program = built("llama").program
    write(Pause(), short, {ALL: {ROWS: part[1][:, 1:]}}, first_product(program, program.step), {})
    for file, why in ((short, "this model needs"), (tmp_path / "none", "does not exist")):
        with pytest.raises(PassError, match=why):
            built("llama", tables={"prompt": {"use": "pause", "trained": str(file)}})
    with pytest.raises(PassError, match="another model"):
        built("qwen2", tables=tables)
    with pytest.raises(RecipeError, match="pauses is -1"):
        Pause(pauses=-1)
    for facts, why in (({"encoder": 1}, "start tokens"), ({"both_ways": True}, "see later ones")):
        known = {"both_ways": False, "embedding": None, "encoder": None, **facts}
        with pytest.raises(PassError, match=f"prompt.pause: .*{why}"):
            check(SimpleNamespace(facts=SimpleNamespace(**known)), "prompt.pause")
    with pytest.raises(RecipeError, match="TEXT_PROMPT"):
        built("llama", tables={**tables, "loop": {"use": "self-infill"}})
    assert chosen({})[0].use == "autoregressive"


def test_training_is_of_the_embedding_alone_and_its_losses_are_the_module_s():
    soft = Paused(over_state(capture(module("llama"), max_context=CONTEXT)), Pause(pauses=M))
    parts = soft.start(1, 0)
    ids = torch.from_numpy(TOKENS[:, :31])
    lookup, half = module("llama").get_input_embeddings(), 15
    with torch.no_grad():
        read = lookup(ids[:, :-1])
        pauses = parts[ALL][ROWS].expand(len(ids), M, -1)
        stream = torch.cat((read[:, :half], pauses, read[:, half:]), 1)
        logits = module("llama")(inputs_embeds=stream).logits[:, half + M - 1 :]
        want = -logits.log_softmax(-1).gather(2, ids[:, half:, None])[:, :, 0]
    got = soft.losses(parts[ALL][ROWS], ids, M)
    assert torch.allclose(got, want, atol=1e-4)
    before = {name: tensor.clone() for name, tensor in soft.fixed.items()}
    run = PauseRun(soft, parts, TrainOptions(rate=0.05), file=None)
    losses = [run.learn(ids, torch.ones(3, 30))["loss"] for _ in range(30)]
    assert losses[-1] < losses[0] - 0.01 and abs(losses[0] - float(want.mean())) < 1e-4
    assert all(torch.equal(tensor, before[name]) for name, tensor in soft.fixed.items())
