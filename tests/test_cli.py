"""The command line: what each command prints, how each mistake ends, what is never imported."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap

import models
import pytest
from typer.testing import CliRunner

import accel
from accel import cli
from accel.runtime.artifact.artifact import bind, digest, write_manifest
from accel.runtime.backends.onnx import peaks

from . import adapter_case

COMMANDS = [str(command.name) for command in cli.app.registered_commands]


def call(*arguments, stdin=None, env=None):
    """One command, in this process."""
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], input=stdin, env=env)


def fresh(*arguments, **options):
    """One command, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "accel.cli", *map(str, arguments)],
        capture_output=True, text=True, timeout=300, **options,
    )  # fmt: skip


def one_error(result, *words, code=1):
    """It ended with one line on stderr, which holds these words."""
    lines = [line for line in result.stderr.splitlines() if not re.match(r"\w+: +\d+% ", line)]
    assert result.exit_code == code, result.output
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    for word in words:
        assert word in lines[0], f"{word!r} is not in: {lines[0]}"


def left(folder):
    """Everything in a folder, hidden things too."""
    return sorted(os.listdir(folder))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model directory: a tiny Llama with a byte-level tokenizer that fits it."""
    return models.write(tmp_path_factory.mktemp("cli") / "tiny")


@pytest.fixture(scope="module")
def built(model, tmp_path_factory):
    """What `build` printed, and the artifact and texts that it left."""
    out = tmp_path_factory.mktemp("built")
    result = call(
        "build", model, "--out", out / "artifact", "--max-context", 256, "--dump", out / "text"
    )
    assert result.exit_code == 0, result.output
    result.out = out
    return result


@pytest.fixture(scope="module")
def artifact(built):
    return built.out / "artifact"


def test_build_shows_progress_and_a_summary(built, artifact):
    assert re.search(r"^build:  10% capture$", built.stderr, re.M)
    assert built.stderr.rstrip().endswith("100% done")
    for word in ("Attention", "largest error", "seconds", "weights.bin", "layers", "base"):
        assert word in built.stdout, word
    assert str(artifact) in built.stdout
    assert {"accel.json", "step.onnx", "weights.bin", "report.html"} <= set(left(artifact))
    assert left(built.out) == ["artifact", "text"], "nothing else was left"


def test_dump_has_the_text_after_each_pass(built):
    report = accel.load(built.out / "artifact").report
    names = [p.stem.partition("-")[2] for p in sorted((built.out / "text").iterdir())]
    assert names == ["captured", *(s["name"].lower() for s in report["steps"])]
    texts = [p.read_text() for p in sorted((built.out / "text").iterdir())]
    assert "scaled_dot_product_attention" in texts[0] and "accel.attention" in texts[-1]


def test_run_gives_the_tokens_of_generate(artifact):
    with accel.load(artifact) as loaded:
        want = loaded.generate("0123", 12)
        ids = loaded.generate([5, 6, 7], 6).tokens[0]
    assert call("run", artifact, "--prompt", "0123", "--max-new-tokens", 12).stdout == (
        want.text[0] + "\n"
    )
    result = call("run", artifact, "--max-new-tokens", 12, "--json", stdin="0123\n")
    found = json.loads(result.stdout)
    assert found["tokens"] == want.tokens[0] and found["text"] == want.text[0]
    assert found["stats"].keys() == want.stats.keys()
    result = call("run", artifact, "--tokens", "5,6 7", "--max-new-tokens", 6)
    assert result.stdout == ",".join(map(str, ids)) + "\n"


def test_run_says_why_it_wrote_nothing(artifact, model, tmp_path):
    with accel.load(artifact) as loaded:
        first, *_ = loaded.generate("0123", 1).tokens[0]
    folder = shutil.copytree(model, tmp_path / "ends")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    content = next(t for t, i in tokenizer["model"]["vocab"].items() if i == first)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] = [{"id": first, "content": content, "special": True, **flags}]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    silent = call("run", folder, "--prompt", "0123", "--eos", first, "--max-context", 64)
    assert (silent.stdout, silent.exit_code) == ("\n", 0)
    assert "the text ended with its first token; --ignore-eos goes on" in silent.stderr
    assert "first token" not in call("run", artifact, "--prompt", "0123").stderr


def test_run_samples_as_asked(artifact, tmp_path):
    options = dict(temperature=0.9, top_k=40, top_p=0.9, repetition_penalty=1.1, seed=5)
    with accel.load(artifact) as loaded:
        want = loaded.generate("0123", 20, stop=["b"], eos=[7], **options)
    flags = [f for n, v in options.items() for f in (f"--{n.replace('_', '-')}", v)]
    (tmp_path / "prompt").write_text("0123\n")
    flags += ["--stop", "b", "--eos", 7, "--max-new-tokens", 20, "--threads", 1, "--json"]
    found = json.loads(call("run", artifact, "--prompt-file", tmp_path / "prompt", *flags).stdout)
    assert (found["tokens"], found["text"]) == (want.tokens[0], want.text[0])


def test_run_and_a_recipe_choose_a_sampler(artifact, model, tmp_path):
    """On the command line by name and options; of a recipe, as it says."""
    warm = dict(temperature=1.5, seed=5)
    flags = ["--prompt", "0123", "--temperature", 1.5, "--seed", 5, "--max-new-tokens", 20]
    flags += ["--ignore-eos", "--json"]
    with accel.load(artifact) as loaded:
        asked = {"use": "bregman-topk", "alpha": 1.0, "price": 0.2}
        plainly = loaded.generate("0123", 20, eos=[], **warm).tokens[0]
        want = loaded.generate("0123", 20, eos=[], sampler=asked, **warm).tokens[0]
    typed = call("run", artifact, *flags, "--sampler", "bregman-topk,alpha=1.0,price=0.2")
    assert json.loads(typed.stdout)["tokens"] == want != plainly
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[sample]\nuse = "bregman-topk"\nalpha = 1.0\nprice = 0.2\n')
    built = call("run", model, *flags, "--recipe", recipe, "--max-context", 64)
    assert json.loads(built.stdout)["tokens"] == want


def test_run_gives_samples_log_probabilities_and_structure(artifact, tmp_path):
    (tmp_path / "schema.json").write_text('{"enum": [10, 35]}')
    (tmp_path / "digits.lark").write_text('start: "(" /[0-9]{2}/ ")"')
    forms = {
        "--json-schema": ("schema.json", "10|35"),
        "--grammar": ("digits.lark", r"\([0-9]{2}\)"),
    }
    for option, (name, form) in forms.items():
        result = call("run", artifact, "--prompt", "0", option, tmp_path / name)
        assert re.fullmatch(form, result.stdout.strip()), result.output
    flags = ["--regex", "[0-9]{3}", "--temperature", 1, "--seed", 2, "--logprobs", 1, "--json"]
    one = json.loads(call("run", artifact, "--prompt", "0", *flags).stdout)
    several = json.loads(call("run", artifact, "--prompt", "0", "-n", 3, *flags).stdout)
    assert several.keys() == {"samples", "stats"} and len(several["samples"]) == 3
    assert several["samples"][0] == {k: v for k, v in one.items() if k != "stats"}
    assert one["finish_reason"] == "stop" and re.fullmatch("[0-9]{3}", one["text"])
    for token, line in zip(one["tokens"], one["logprobs"], strict=True):
        assert line[str(token)].keys() == {"logprob", "rank", "decoded_token"}
    assert call("run", artifact, "--prompt", "0", "--save-session", tmp_path / "s").exit_code == 0
    behind = call("run", artifact, "--session", tmp_path / "s", "--prompt", "1", *flags)
    assert behind.exit_code == 0, behind.output
    assert json.loads(behind.stdout).keys() == one.keys()


def test_run_takes_a_model_directory(model, artifact):
    asked = ("--prompt", "0123", "--max-new-tokens", 8)
    result = call("run", model, *asked, "--max-context", 128)
    assert result.stdout == call("run", artifact, *asked).stdout, result.output
    assert "compile: 100% done" in result.stderr


@pytest.mark.parametrize(
    "option",
    [
        ("--recipe", "int4"),
        ("--max-context", 2048),
        ("--tokenizer", "tokenizer.json"),
        ("--trust-remote-code",),
    ],
    ids=lambda words: words[0],
)
def test_an_option_of_a_build_cannot_apply_to_an_artifact(artifact, option):
    result = call("run", artifact, "--prompt", "0123", *option)
    one_error(result, option[0], "is an artifact; leave it out, or build again")


def test_an_option_of_an_artifact_cannot_apply_to_a_model(model):
    result = call("run", model, "--prompt", "0123", "--kernels", "portable")
    one_error(result, "--kernels", "is a model directory; leave it out, or build first")
    result = call("run", model, "--prompt", "0123", "--adapter", "poet")
    one_error(result, "--adapter", "is a model directory; merge one for this run (--merge-adapter")


@pytest.mark.long
def test_adapters_are_built_in_and_chosen_by_name(model, tmp_path):
    from transformers import LlamaForCausalLM

    module = LlamaForCausalLM.from_pretrained(model)
    folder = adapter_case.write(tmp_path / "poet", module, ["q_proj", "up_proj"])
    out = tmp_path / "out"
    result = call("build", model, "--adapter", f"poet={folder}", "--no-verify", "--out", out)
    assert result.exit_code == 0 and "poet (rank 3, " in result.output, result.output
    assert "poet (rank 3, " in call("inspect", out).output
    with accel.load(out) as loaded:
        want = loaded.generate([5, 6, 7], 6, adapter="poet").tokens[0]
        assert want != loaded.generate([5, 6, 7], 6).tokens[0]
    options = ["--tokens", "5,6,7", "--max-new-tokens", 6, "--json"]
    result = call("run", out, "--adapter", "poet", *options)
    assert json.loads(result.stdout)["tokens"] == want
    result = call("run", model, "--merge-adapter", folder, *options)
    assert json.loads(result.stdout)["tokens"] == want
    one_error(call("run", out, "--adapter", "pot", *options), "did you mean 'poet'?")
    one_error(call("run", out, "--merge-adapter", folder, *options), "is an artifact; leave it out")


def test_inspect(artifact):
    text = call("inspect", artifact).stdout
    assert all(w in text for w in ("LlamaForCausalLM", "causal", "0-1", "step.onnx", "Rope"))
    found = json.loads(call("inspect", artifact, "--json").stdout)
    manifest = json.loads((artifact / "accel.json").read_text())
    assert found["files"] == manifest["files"] and found["state"] == manifest["state"]
    # Per layer: keys and values of 2 heads of 10 floats; shared: one int64 position.
    assert found["state_bytes_per_token"] == 2 * 2 * 2 * 10 * 4 + 8


def test_recipes_and_their_options():
    assert {"base", "float16"} <= set(re.findall(r"^  (\S+)", call("recipes").stdout, re.M))
    for name, said in (("snapkv", "tokens_kept"), ("prompt-lookup", 'use = "speculative"')):
        assert said in call("recipes", name).stdout, "what the recipe leaves out is told too"
    text = call("recipes", "float16").stdout
    assert "[weights]" in text and re.search(r"smallest +4096 +4096 +int +at least 0", text)
    (found,) = json.loads(call("recipes", "float16", "--json").stdout)["options"].values()
    assert found == [
        {
            "name": "smallest",
            "value": 4096,
            "default": 4096,
            "type": "int",
            "range": "at least 0",
            "set": False,
        }
    ]
    assert {r["name"] for r in json.loads(call("recipes", "--json").stdout)} >= {"base", "float16"}


def test_bench(artifact, monkeypatch):
    monkeypatch.setattr(peaks, "SECONDS", 0.1)
    flags = ("--tokens", 4, "--repeat", 1, "--threads", 1)
    found = json.loads(call("bench", artifact, "--context", 9, *flags, "--json").stdout)
    (row,) = found["rows"]
    assert row["context"] == 9 and found["threads"] == 1 and found["load_seconds"] > 0
    assert 0 < row["outside_onnxruntime_ms"] < row["step_ms"]
    assert row["read_bytes"] > found["weight_bytes"] > 0 and found["slope"] is None
    assert 0 < row["decode_share"] < 1.5 and 0 < row["prefill_share"] < 1.5
    assert [p["threads"] for p in found["peaks"]] == [1] and found["conditions"]["date"]
    assert "decode tokens/s" in call("bench", artifact, "--context", 3, *flags).stdout


def test_light_commands_import_neither_torch_nor_transformers(artifact):
    """Each in a process that holds what a fresh one does: a copy of one that has the command line loaded. And --help
    comes at once, without numpy even.
    """
    code = textwrap.dedent(
        """
        import json, os, sys
        from accel import cli
        HEAVY = {"torch", "transformers", "numpy", "rich", "fastapi", "ray", "pyarrow"}
        begun = sorted(HEAVY & sys.modules.keys())
        for line in sys.stdin:
            if (child := os.fork()) == 0:
                ended = 1
                try:
                    sys.argv = ["accel-compile", *json.loads(line)]
                    cli.main()
                except SystemExit as end:
                    ended = end.code or 0
                print(json.dumps([ended, begun, sorted(HEAVY & sys.modules.keys())]), file=sys.stderr, flush=True)
                sys.stdout.flush()
                os._exit(0)
            os.waitpid(child, 0)
        """
    )
    asked = [[command, "--help"] for command in COMMANDS]
    asked += [["--version"], ["inspect", artifact], ["recipes"]]
    asked += [["run", artifact, "--prompt", "0", "--max-new-tokens", "2"]]
    lines = "".join(json.dumps([str(word) for word in words]) + "\n" for words in asked)
    done = subprocess.run([sys.executable, "-c", code], input=lines, capture_output=True, text=True)
    told = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("[")]
    assert done.returncode == 0 and len(told) == len(asked), done.stderr
    assert all(ended == 0 and begun == [] for ended, begun, _ in told), done.stderr
    *light, inspect, recipes, run = (set(heavy) for *_, heavy in told)
    assert not set().union(*light)
    assert inspect <= {"numpy", "rich"} and recipes <= {"rich"} and run == {"numpy"}


def test_help_has_examples_and_answers_at_once():
    start = os.times()  # of the processor, which other tests use at the same time
    result, end = fresh("--help"), os.times()
    spent = sum(end[2:4]) - sum(start[2:4])
    assert 0 < spent < 1.5, "measured: 0.25 s"
    assert all(name in result.stdout for name in COMMANDS)
    for command in COMMANDS:
        text = call(command, "--help").stdout
        assert f"Examples:\n    accel-compile {command}" in text, text
    assert call("--version").stdout == f"accel-compile {accel.__version__}\n"
    assert call().exit_code == 2


WRONG = {
    "no prompt": (["--prompt", ""], ["prompt 0 is empty", "give"]),
    "too long": (["--prompt", "0" * 300], ["300 tokens", "max_context is 256", "Shorten"]),
    "no such token": (["--tokens", "3,101"], ["101", "0..100"]),
    "temperature": (["--prompt", "0", "--temperature", -1], ["temperature", "0 or more"]),
    "top_p": (["--prompt", "0", "--top-p", 1.5], ["top_p", "at most 1"]),
    "top_k": (["--prompt", "0", "--top-k", 0], ["top_k", "1"]),
    "min_p": (["--prompt", "0", "--min-p", -0.1], ["min_p", "0"]),
    "sampler": (["--prompt", "0", "--sampler", "typcal"], ["sampler", "'typcal'", "'typical'"]),
    "sampler's option": (["--prompt", "0", "--sampler", "typical,mass=2"], ["mass", "less than 1"]),
    "sampler's form": (["--prompt", "0", "--sampler", "typical,2"], ["'2'", "NAME,OPTION=VALUE"]),
    "seed": (["--prompt", "0", "--seed", -1], ["seed", "0 or more"]),
    "count": (["--prompt", "0", "--max-new-tokens", 0], ["max_tokens", "1 or more"]),
    "stop": (["--prompt", "0", "--stop", ""], ["stop", "non-empty"]),
    "eos": (["--prompt", "0", "--eos", 999], ["stop_token_ids", "999", "0..100"]),
    "regex": (["--prompt", "0", "--regex", "["], ["regex is not valid"]),
    "bytes": (["--prompt", b"a\xff".decode("utf-8", "surrogateescape")], ["UTF-8", "byte 1"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_prompt_or_option_is_one_line(artifact, name):
    flags, words = WRONG[name]
    one_error(call("run", artifact, *flags), *words)


USAGE = {
    "unknown command": (["biuld"], ["biuld", "build"]),
    "unknown option": (["run", "x", "--promt", "y"], ["--promt", "--prompt", "run --help"]),
    "no model": (["build", "--out", "x"], ["MODEL", "build --help"]),
    "no out": (["build", "x"], ["--out"]),
    "two prompts": (["run", "x", "--prompt", "a", "--tokens", "1"], ["--prompt and --tokens"]),
    "samples": (["run", "x", "--prompt", "a", "-n", "2"], ["-n and --logprobs", "--json"]),
    "two forms": (
        ["run", "x", "--prompt", "a", "--regex", "a", "--grammar", __file__],
        ["--regex and --grammar"],
    ),
    "ids": (["run", "x", "--tokens", "1,b"], ["'b'", "1,2,3"]),
    "no adapter": (["build", "x", "--out", "y", "--adapter", "z"], ["z is not NAME=DIR"]),
    "two of a name": (
        ["build", "x", "--out", "y", "--adapter", "a=b", "--adapter", "a=c"],
        ["a is given twice"],
    ),
    "no file": (["run", "x", "--prompt-file", "/no/such"], ["/no/such"]),
    "a number": (["build", "x", "--out", "y", "--max-context", "0"], ["--max-context"]),
}


@pytest.mark.parametrize("name", USAGE)
def test_wrong_usage_exits_2(name):
    arguments, words = USAGE[name]
    one_error(call(*arguments), *words, code=2)


@pytest.mark.parametrize("data", [b"", b"PK\3\4", b"\x93NUMPY\1\0v\0{"])
def test_an_array_that_cannot_be_read(tmp_path, data):
    (tmp_path / "input.npy").write_bytes(data)
    one_error(call("run", "x", "--input", tmp_path / "input.npy"), "input.npy", "numpy.save")


def test_text_without_a_tokenizer(artifact, tmp_path):
    copy = shutil.copytree(artifact, tmp_path / "copy")
    manifest = json.loads((copy / "accel.json").read_text())
    (copy / "tokenizer.json").unlink()
    write_manifest(copy, manifest, bind(copy, manifest))
    one_error(call("run", copy, "--prompt", "0"), "no tokenizer", "token ids", "--tokenizer PATH")
    one_error(call("run", copy, "--tokens", "5", "--stop", "x"), "stop needs a tokenizer", "--eos")


def test_what_cannot_be_built(model, tmp_path):
    out = tmp_path / "out"
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    own = shutil.copytree(model, tmp_path / "own")
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(
        json.dumps({**config, "model_type": "own", "auto_map": {"AutoConfig": "a.B"}})
    )
    (own / "a.py").write_text("raise SystemExit('this code must not run')")
    before = left(tmp_path)
    one_error(call("build", tmp_path / "no", "--out", out), "no does not exist", "model directory")
    one_error(call("build", model, "--out", out, "--recipe", "flot16"), "did you mean 'float16'")
    one_error(call("build", model, "--out", out, "--recipe", "/no.toml"), "/no.toml")
    one_error(call("build", model, "--out", out, "--target", "onxn"), "did you mean 'onnx'")
    one_error(call("build", model, "--out", out, "--tokenizer", "/no"), "/no", "tokenizer.json")
    one_error(call("build", own, "--out", out), "auto_map", "--trust-remote-code")
    one_error(
        call("build", model, "--out", full, "--no-verify"), "full", "give another output folder"
    )
    assert left(tmp_path) == before and left(full) == ["mine.txt"], "nothing is left, nothing lost"


def test_recipes_that_are_wrong(model, tmp_path):
    clash = tmp_path / "other.toml"
    clash.write_text('[weights]\nuse = "float16"\nsmallest = 1\n')
    wrong = {
        '[wieghts]\nuse = "float16"': ["axis 'wieghts'", "did you mean 'weights'"],
        '[weights]\nuse = "floot16"': ["'floot16'", "did you mean 'float16'"],
        '[weights]\nuse = "float16"\nsmalest = 1': ["'smalest'", "did you mean 'smallest'"],
        '[weights]\nuse = "float16"\nsmallest = "x"': ["smallest", "not int"],
        "[weights": ["not valid TOML"],
    }
    for text, words in wrong.items():
        (tmp_path / "mine.toml").write_text(text)
        one_error(call("recipes", tmp_path / "mine.toml"), *words)
    flags = ("--recipe", "float16", "--recipe", clash)
    result = call("build", model, "--out", tmp_path / "out", *flags)
    one_error(result, "'float16' and 'other' both set weights", "leave one out")


def test_artifacts_that_are_wrong(artifact, model, tmp_path):
    def broken(change):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(artifact, copy)
        change(copy)
        return copy

    def edit(**changes):
        def change(folder):
            file = folder / "accel.json"
            changed = {**json.loads(file.read_text()), **changes}
            file.write_text(json.dumps({**changed, "digest": digest(changed)}))

        return broken(change)

    def damage(folder):
        data = bytearray((folder / "weights.bin").read_bytes())
        data[100] ^= 1
        (folder / "weights.bin").write_bytes(data)

    for command in ("inspect", "bench", "run"):
        flags = ["--prompt", "0"] if command == "run" else []
        one_error(call(command, edit(format=99), *flags), "format 99 is newer", "it needs accel")
        one_error(call(command, broken(damage), *flags), "weights.bin", "build it again")
        one_error(
            call(command, broken(lambda copy: os.truncate(copy / "step.onnx", 1000)), *flags),
            "step.onnx",
            "1,000 bytes",
            "again",
        )
        one_error(call(command, edit(grade="better"), *flags), "'grade' in accel.json", "again")
        one_error(call(command, tmp_path, *flags), "accel.json", "accel-compile build")
    names = json.loads((artifact / "accel.json").read_text())["files"]
    outside = {"../secret": names["weights.bin"], **names}
    one_error(call("inspect", edit(files=outside)), "../secret", "do not trust it")
    near = artifact.with_name("artefact")
    one_error(call("run", near, "--prompt", "0"), str(near), f"did you mean {artifact}?")


def test_no_space_leaves_nothing(model, tmp_path, monkeypatch):
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda p: real(p)._replace(free=1000))
    result = call("build", model, "--out", tmp_path / "deep" / "out", "--no-verify")
    one_error(result, "no space", "1,000 are free", "give another output folder")
    assert left(tmp_path) == []


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(
    "name, code, part",
    [
        ("SIGINT", 130, "compiler.optimize.capture_inspected"),
        ("SIGTERM", 143, "lowering.onnx.export.export_all"),
    ],
)
def test_signals_leave_nothing(model, tmp_path, monkeypatch, capsys, name, code, part):
    """Ctrl-C and SIGTERM through the real entry point, in the midst of a build."""
    seen = []

    def interrupt(*_, **__):
        seen.append(left(tmp_path))
        signal.raise_signal(getattr(signal, name))

    old = [(n, signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored where tests run in the background
    monkeypatch.setattr(f"accel.{part}", interrupt)
    monkeypatch.setattr(
        sys, "argv", f"accel-compile build {model} --no-verify --out {tmp_path}/new/out".split()
    )
    try:
        with pytest.raises(SystemExit) as end:
            cli.main()
    finally:
        for number, handler in old:
            signal.signal(number, handler)
    assert end.value.code == code
    assert seen == [["new"] if "export" in part else []], "the hidden folder lies in `new`"
    assert left(tmp_path) == []
    assert "Traceback" not in capsys.readouterr().err


def test_surprises_are_one_line_and_a_traceback_when_asked(artifact, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("by\nnought")

    monkeypatch.setattr("accel.runtime.model.load.from_artifact", broken)
    flags = ("run", artifact, "--prompt", "0")
    words = ("ZeroDivisionError: by nought", "bug in accel", "ACCEL_TRACEBACK=1")
    one_error(call(*flags), *words)
    traced = call(*flags, env={"ACCEL_TRACEBACK": "1"})
    assert traced.exit_code == 1 and "Traceback" in traced.stderr
    monkeypatch.setattr(
        "accel.runtime.model.load.from_artifact", lambda *_, **__: exec("raise MemoryError")
    )
    one_error(call(*flags), "out of memory")
    one_error(call("build", artifact, "--out", "x", "--dump", "/dev/null/x"), "/dev/null/x")


def test_a_reader_that_leaves_ends_it_quietly(artifact):
    command = f"'{sys.executable}' -m accel.cli inspect '{artifact}' --json | head -c 1"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert run.stdout == "{" and run.stderr == ""
