"""Errors name options as Python has them, `name=value`; the command line says its own in their place."""

import ast
import inspect
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers as hf
import typer
from typer.testing import CliRunner

import accel
from accel import cli
from accel.commands import options
from accel.compiler import optimize as building
from accel.compiler.smoke.clone import depth
from accel.ir.errors import Miscompiled
from accel.runtime.model import load as loading

COMMANDS = typer.main.get_command(cli.app).commands
ROOT = Path(__file__).parents[1]
OPTIONS = {
    name for call in (accel.optimize, accel.load) for name in inspect.signature(call).parameters
}


def call(*arguments, stdin=None):
    return CliRunner().invoke(cli.app, [str(one) for one in arguments], input=stdin)


def told(result):
    """The line of an error."""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.exit_code == 1
    return line


TEXTS = [
    ("build", "verify=False builds without the check", "--no-verify builds without the check"),
    ("run", "or give verify=False to", "or give accel-compile build --no-verify to"),
    ("build", "use target='onnx', or", "use --target onnx, or"),
    ("build", "allow it with trust_remote_code=True", "allow it with --trust-remote-code"),
    ("chat", "a template with chat_template=…", "a template with --chat-template FILE|NAME"),
    ("run", "with them (adapters={name: DIR}), or", "with them (accel-compile build --adapter NAME=DIR), or"),
    ("build", "(adapters={name: DIR})", "(--adapter NAME=DIR)"),
    ("serve", "merge it (merge_adapter=DIR)", "merge it (accel-compile build --merge-adapter DIR)"),
    ("", "give temperature=…, top_k=… and", "give accel-compile run --temperature X, accel-compile run --top-k N and"),
    # what is no option, or part of a path
    ("build", "save_compressed=True, is_decoder = True", "save_compressed=True, is_decoder = True"),
    ("run", "/runs/seed=3/model: x-seed=3, download=False", "/runs/seed=3/model: x-seed=3, download=False"),
]  # fmt: skip


@pytest.mark.parametrize("command, text, words", TEXTS)
def test_the_command_lines_words(command, text, words):
    assert options.spelled(text, COMMANDS, command) == words


@cache
def messages():
    """(place, text) of the strings of several words that the package has, docstrings left out."""
    return list(_messages())


def _messages():
    for folder in ("api", "ir", "lowering", "passes", "runtime"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "commands" not in path.relative_to(ROOT).parts and path.name != "cli.py":
                place = path.relative_to(ROOT).as_posix()
                yield from ((f"{place}:{line}", text) for line, text in _strings(path))


def _strings(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inner = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
            text = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if " " in text and id(node) not in docs | inner:
            yield node.lineno, text


def test_every_message_speaks_of_options_so_that_each_front_can_say_its_own():
    """One that names the command line's would tell Python's users of it, and both would tell everyone of the other."""
    found = messages()
    whole = ("accel-compile ", "python tools/")  # commands to be typed as they stand
    own = "|".join(sorted(name.replace("_", "-") for name in OPTIONS))
    foreign = [
        (place, text)
        for place, text in found
        if not place.startswith("api/serve/")  # which the command alone starts
        and re.search(rf"(?<![\w-])--(no-)?({own})\b", text)
        and not any(one in text for one in whole)
    ]
    assert not foreign
    python = re.compile(rf"(?<![\w/.=-])({'|'.join(sorted(OPTIONS))})=[^\s=]")
    named = [(place, text) for place, text in found if python.search(text)]
    assert len(named) > 10
    for place, text in named:
        said = options.spelled(text, COMMANDS, "build")
        assert not python.search(said) or "accel." in text, (place, said)


def test_advice_names_an_option_with_its_value():
    """Else it stays Python's word on the command line."""
    names = "|".join(name for name in sorted(OPTIONS) if "_" in name)
    words = "give|pass|with|set|raise|lower|larger|smaller|longer|another|higher|leave"
    bare = re.compile(
        rf"\b(?:{words}) (?:(?:an?|another|larger|smaller) )*(?:{names})\b(?!=[^\s=])"
    )
    cut = re.compile(rf"(?<![\w/.=-])(?:{'|'.join(sorted(OPTIONS))})=(?=$|[\s,;.)])")
    for wrong in ("build with a larger max_context", "give max_batch = 3", "build with tokenizer="):
        assert bare.search(wrong) or cut.search(wrong)
    assert not [one for one in messages() if bare.search(one[1]) or cut.search(one[1])]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A model directory without a chat template, and its artifact."""
    folder = tmp_path_factory.mktemp("plain")
    config = hf.LlamaConfig(
        vocab_size=4096, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    hf.LlamaForCausalLM(config).save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (ROOT / "api" / "reference" / name).read_text()
        (folder / "model" / name).write_text(text)
    accel.optimize(folder / "model", max_context=32, out=folder / "artifact", verify=False).close()
    return folder


@pytest.mark.parametrize("kind", ["model", "artifact"])
def test_chat_asks_for_a_template_before_it_loads_or_builds(kind, plain, monkeypatch):
    def never(*_, **__):
        raise AssertionError("the model is opened")

    monkeypatch.setattr(loading, "load", never)
    monkeypatch.setattr(building, "optimize", never)
    line = told(call("chat", plain / kind, stdin="hi\n"))
    assert "no chat template" in line and "--chat-template FILE|NAME" in line
    assert "chat_template" not in line
    wrong = told(call("chat", plain / kind, "--chat-template", "tool_use", stdin="hi\n"))
    assert "chat template 'tool_use' does not exist" in wrong


def test_chat_takes_a_template_of_its_own(plain, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages[-1].content }}")
    result = call(
        "chat",
        plain / "artifact",
        "--chat-template",
        tmp_path / "t.jinja",
        "--max-tokens",
        2,
        stdin="hi\n",
    )
    assert result.exit_code == 0, result.output


def test_errors_of_commands_are_in_their_words(plain, monkeypatch):
    artifact, model = plain / "artifact", plain / "model"
    line = told(call("run", artifact, "--prompt", "x", "--adapter", "y"))
    assert "(accel-compile build --adapter NAME=DIR)" in line and "adapters=" not in line

    def differs(*_, **__):
        raise Miscompiled("it differs; verify=False builds without the check")

    monkeypatch.setattr(building, "optimize", differs)
    line = told(call("build", model, "--out", plain / "out"))
    assert line.endswith("it differs; --no-verify builds without the check")
    line = told(call("run", model, "--prompt", "x"))
    assert line.endswith("accel-compile build --no-verify builds without the check")


def test_a_repository_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    line = told(call("build", "org/name", "--out", tmp_path / "out"))
    assert "with --download" in line and "download=True" not in line


def test_a_line_of_chat(capsys):
    """Where a person sits at it, an error does not end it."""
    from accel.commands.chat import Terminal

    chat = SimpleNamespace(send=lambda *_: (_ for _ in ()).throw(accel.InputError("verify=False")))
    terminal = Terminal(chat, None, lambda text: options.spelled(text, COMMANDS, "build"))
    lines = iter(["hi"])
    terminal._person = True
    terminal._line = lambda _: next(lines, None) or (_ for _ in ()).throw(EOFError())
    terminal.run()
    assert "error: --no-verify" in capsys.readouterr().err


def test_a_configuration_is_read_without_transformers_notes(monkeypatch):
    """Of its classes' properties some are old names of fields, and reading one writes a note on stderr."""
    from transformers import configuration_utils

    said = []
    monkeypatch.setattr(configuration_utils.logger, "warning_once", said.append)
    config = hf.Gemma2Config(num_hidden_layers=6)
    assert depth(config)[0] == 2 and said == []
    assert config.torch_dtype is None and len(said) == 1  # the control
