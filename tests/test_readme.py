"""What the README tells works: its Python runs, its commands have these options, its links lead
somewhere.
"""

import re
import shlex
import tomllib
from pathlib import Path

import models
import pytest
from typer.main import get_command

import accel
from accel import cli
from accel.commands import demo
from accel.ir.recipe import Recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    """The fenced blocks of a language, with their line numbers."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)
    return [(README[: m.start()].count("\n") + 2, m.group(1)) for m in found]


def commands():
    """Every line of a shell block that calls accel-compile, as words, without its comment."""
    for line, text in blocks("sh"):
        for number, command in enumerate(text.splitlines()):
            words = shlex.split(command, comments=True)
            while "|" in words:
                words = words[words.index("|") + 1 :]
            if words and words[0] == "accel-compile":
                yield line + number, words[1:]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with `my-model` in it: two layers of random weights, the bundled tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    models.randomise(LlamaForCausalLM(config), "readme").save_pretrained(tmp_path / "my-model")
    tokenizer = (demo.reference() / "tokenizer.json").read_text(encoding="utf-8")
    (tmp_path / "my-model" / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_blocks_run_in_order(workplace, capsys):
    ran = []
    for line, code in blocks("python"):
        space = {"__name__": f"readme_{line}"}
        exec(compile("\n" * (line - 1) + code, "README.md", "exec"), space)
        ran.append(space)
    assert len(ran) >= 5 and (workplace / "artifact" / "report.html").is_file()
    assert capsys.readouterr().out
    with accel.optimize(models.PlainSdpa().eval(), target="eager", verify=False) as plain:
        program = plain.program
        (method,) = (s["Rounded"] for s in ran if "Rounded" in s)
        assert method(bits=4).run(program).changed > 0
        assert all(w.unique().numel() <= 17 for w in program.params.values() if w.dim() == 2)


def test_commands_have_the_options_shown():
    known = get_command(cli.app).commands
    seen = {words[0] for _, words in commands()}
    assert seen == set(known), "each command is shown"
    for line, words in commands():
        options = {o for p in known[words[0]].params for o in p.opts}
        for word in words[1:]:
            assert not word.startswith("-") or word in options, f"README.md:{line}: {word}"


def test_recipes_shown_are_recipes():
    assert blocks("toml")
    for _, text in blocks("toml"):
        accel.Recipe.load(tomllib.loads(text))
    for line, words in commands():
        names = [b for a, b in zip(words, words[1:], strict=False) if a == "--recipe"]
        for name in names + (words[1:] if words[0] == "recipes" else []):
            assert Recipe.load(name).tables, f"README.md:{line}"


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / link).is_file(), link
    for picture in (ROOT / "docs" / "pictures").iterdir():
        assert picture.name in README and picture.stat().st_size < 200_000


def test_make_has_the_two_commands():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    for _, text in blocks("sh"):
        for target in re.findall(r"^make (\w+)", text, re.M):
            assert target in targets
