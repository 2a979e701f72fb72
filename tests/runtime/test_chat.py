"""Conversations: each answer is what the model gives to the messages alone, and earlier tokens are not run again."""

import json

import pytest

from accel.cli import app
from accel.commands.chat import Terminal
from accel.ir.errors import InputError
from accel.runtime.artifact.artifact import open_artifact
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.model.compiled import CompiledModel

TEMPLATE = """{% for m in messages %}<{{ m.role }}>
{{ m.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>
{% endif %}"""
KWARGS = {"chat_template": TEMPLATE}
TALK = ["the lazy dog, again", "for i in range(10)", "naïve café", "def add(a, b):"]
LOOPS = {
    "autoregressive": {"loop": {"use": "autoregressive"}},
    "prompt-lookup": {"loop": {"use": "speculative"}, "draft": {"use": "prompt-lookup", "ngram": 1}},
    "beam-patience": {"loop": {"use": "beam-patience", "beams": 2}},
}  # fmt: skip


def made(toy, tables=None):
    artifact = open_artifact(toy.path)
    return CompiledModel(
        toy.engines["ort"],
        artifact.facts,
        tokenizer=Tokenizer(toy.path / "tokenizer.json"),
        recipe={"tables": tables or LOOPS["autoregressive"]},
    )


def talk(model, chat, lines, params):
    """The turns' statistics, each answer held to what the messages alone give."""
    for line in lines:
        messages = [*chat.messages, {"role": "user", "content": line}]
        want = model.generate(messages, chat_template_kwargs=KWARGS, sampling_params=params)
        stream = chat.send(line, params)
        assert "".join(stream) == want.text[0] == chat.messages[-1]["content"]
        assert stream.tokens == want.tokens[0]
        assert chat.messages[:-1] == messages
        yield chat.stats


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("warm", [False, True])
def test_answers_are_those_of_the_messages_alone(toy, name, warm):
    if warm and name == "beam-patience":
        pytest.skip("greedy")
    params = SamplingParams(12, temperature=0.8 if warm else 0.0, seed=3 if warm else None)
    model = made(toy, LOOPS[name])
    with model.chat("be brief", chat_template_kwargs=KWARGS) as chat:
        reused = [stats["reused"] for stats in talk(model, chat, TALK, params)]
        prompts = chat.stats["prompt_tokens"]
    assert reused[0] == 0
    assert reused == sorted(set(reused)) and reused[-1] > prompts / 2


def test_a_wrong_prefix_would_be_seen(toy):
    """The negative control: a session of another beginning gives another answer."""
    model = made(toy)
    with model.chat(chat_template_kwargs=KWARGS) as chat:
        list(talk(model, chat, TALK[:2], SamplingParams(12)))
        chat._held = chat._held.copy()
        chat._session.rewind(0)
        chat._session.run([[7] * chat._held.size])
        with pytest.raises(AssertionError):
            list(talk(model, chat, TALK[2:3], SamplingParams(12)))


@pytest.mark.parametrize("name", ["autoregressive", "prompt-lookup"])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_an_answer_that_is_cut_short_stays_as_it_is(toy, name, count):
    params = SamplingParams(20)
    model = made(toy, LOOPS[name])
    with model.chat(chat_template_kwargs=KWARGS) as chat:
        stream = chat.send(TALK[0], params)
        said = [next(stream) for _ in range(count)]
        stream.close()
        if count:
            assert chat.messages[-1] == {"role": "assistant", "content": "".join(said)}
        else:
            assert not chat.messages  # nothing was asked of it
        list(talk(model, chat, TALK[1:3], params))


def test_messages_may_change_between_turns(toy):
    model, params = made(toy), SamplingParams(8)
    with model.chat("be brief", chat_template_kwargs=KWARGS) as chat:
        list(talk(model, chat, TALK[:3], params))
        assert chat.undo() and len(chat.messages) == 5
        list(talk(model, chat, TALK[3:], params))
        chat.messages[0] = {"role": "system", "content": "be long"}
        list(talk(model, chat, TALK[:1], params))
        assert [chat.undo() for _ in range(5)] == [True] * 4 + [False]
        assert chat.messages == [{"role": "system", "content": "be long"}]
        chat.close()
        list(talk(model, chat, TALK[:1], params))


def test_a_turn_that_fails_leaves_the_conversation(toy):
    def wrong(ids, logits):
        raise RuntimeError("no")

    model, params = made(toy), SamplingParams(8)
    with model.chat(chat_template_kwargs=KWARGS) as chat:
        list(talk(model, chat, TALK[:2], params))
        before = list(chat.messages)
        with pytest.raises(InputError, match="wrong"):
            list(chat.send("x", SamplingParams(8, logits_processors=[wrong])))
        assert chat.messages == before
        list(talk(model, chat, TALK[2:], params))


def test_several_samples_are_refused(toy):
    with made(toy).chat(chat_template_kwargs=KWARGS) as chat:
        with pytest.raises(InputError, match="one sample, not n = 2"):
            chat.send("a", SamplingParams(8, temperature=1.0, n=2))
        list(talk(made(toy), chat, TALK[:2], SamplingParams(8)))


def test_two_answers_at_once_are_refused(toy):
    with made(toy).chat(chat_template_kwargs=KWARGS) as chat:
        one, other = chat.send("a", SamplingParams(8)), chat.send("b", SamplingParams(8))
        next(other)
        with pytest.raises(InputError, match="end an answer"):
            next(one)


def test_what_does_not_fit_is_refused(toy):
    with made(toy).chat(chat_template_kwargs=KWARGS) as chat:
        assert chat.context_left == toy.context
        with pytest.raises(InputError, match="max_context is 1300.*undo"):
            chat.send("ab " * 1300)
        "".join(chat.send("ab " * 300, SamplingParams(8)))
        assert 0 < chat.context_left < toy.context - 300


def test_a_model_without_a_template_is_refused(toy):
    with pytest.raises(InputError, match="no chat template"):
        made(toy).chat()
    with pytest.raises(InputError, match="refuses.*only users"):
        refusing = (
            "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('only users') }}"
            "{% endif %}{{ m.content }}{% endfor %}"
        )
        made(toy).chat("be brief", chat_template_kwargs={"chat_template": refusing})


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return path


def answers(toy, template, capsys, monkeypatch, lines, *more):
    """(exit code, stdout, stderr) of a conversation from stdin."""
    import io
    import sys

    source = io.TextIOWrapper(io.BytesIO(lines if isinstance(lines, bytes) else lines.encode()))
    monkeypatch.setattr(sys, "stdin", source)
    command = ["chat", str(toy.path), "--chat-template", str(template), "--max-tokens", "6", *more]
    with pytest.raises(SystemExit) as ended:
        app(command, prog_name="accel-compile")
    return (ended.value.code, *capsys.readouterr())


def test_the_command_answers_each_line(toy, template, tmp_path, capsys, monkeypatch):
    file = tmp_path / "talk.json"
    lines = f"{TALK[0]}\nfor i \\\nin range\n//x\n/stats\n/system be long\n/history\n/save {file}\n"
    code, out, err = answers(toy, template, capsys, monkeypatch, lines)
    assert code == 0
    kept = json.loads(file.read_text())
    assert [one["content"] for one in kept if one["role"] == "user"] == [
        TALK[0],
        "for i \nin range",
        "/x",
    ]
    said = [one["content"] for one in kept if one["role"] == "assistant"]
    assert out.startswith("\n".join(said)) and "[system] be long" in out
    assert "tokens/s" in err and "reused" in err and "of 1300 tokens left" in err

    code, out, _ = answers(
        toy, template, capsys, monkeypatch, "/undo\n/undo\n/retry\n/history\n", "--load", str(file)
    )
    assert code == 0 and out.count("[user]") == 1 and "[assistant] " in out
    code, _, err = answers(toy, template, capsys, monkeypatch, f"/save {file}\n")
    assert code == 1 and "exists" in err and json.loads(file.read_text()) == kept


@pytest.mark.parametrize(
    "lines, error",
    [
        ("/histroy\n", "did you mean '/history'"),
        ("/undo\n", "no message to remove"),
        ("/retry\n", "no message to answer"),
        ("/save\n", "needs a file"),
        ("/save /no/such/talk.json\n", "/save /no/such/talk.json: No such file or directory"),
        ("/save ~no-such-user/talk.json\n", "/save ~no-such-user/talk.json: Could not"),
        ("/save " + "x" * 300 + "\n", "File name too long; give another path"),
        (b"caf\xe9\n", "not UTF-8 text"),
        ("ab " * 1300, "max_context is 1300"),
    ],
)
def test_bad_lines_are_one_line_errors(toy, template, capsys, monkeypatch, lines, error):
    code, out, err = answers(toy, template, capsys, monkeypatch, lines)
    assert code == 1 and error in err and err.count("error:") == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    "text", ["[1]", "{", '[{"content": "x"}]', '[{"role": "user"}]', "\ud800", "[" * 5000]
)
def test_files_that_hold_no_conversation(toy, template, tmp_path, capsys, monkeypatch, text):
    file = tmp_path / "talk.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    code, _, err = answers(toy, template, capsys, monkeypatch, "x\n", "--load", str(file))
    assert code == 1 and "talk.json" in err and "Traceback" not in err


def test_a_person_sees_the_error_and_goes_on(toy, capsys, monkeypatch):
    lines = iter(["/nothing", "/save /no/such/talk.json", TALK[0], "/exit", "never read"])
    monkeypatch.setattr("builtins.input", lambda mark: next(lines))
    with made(toy).chat(chat_template_kwargs=KWARGS) as chat:
        terminal = Terminal(chat, SamplingParams(6))
        terminal._person = True
        terminal.run()
        out, err = capsys.readouterr()
        assert (
            "error: command '/nothing' does not exist" in err
            and "error: /save /no/such/talk.json" in err
            and chat.messages[-1]["content"] in out
        )
        assert "tokens/s" in err and next(lines) == "never read"
