"""Benchmarks, side by side: accel and its peers take turns in one run, and ratios are medians over rounds.

    python tools/bench/bench.py shape l213 OUT                write one of the shapes that are measured (random weights)
    python tools/bench/bench.py build MODEL                   seconds and peak memory of accel-compile build
    python tools/bench/bench.py peers MODEL [ENGINE:VARIANT …] --cache DIR --python PYTHON …
    python tools/bench/bench.py peers FILE.gguf accel:base llama_cpp:file+best ik_llama_cpp:file+best …

`accel-compile bench ARTIFACT` gives the time per step spent outside onnxruntime. Nothing is installed:
a peer is measured when it is found where --python points. docs/figures/details/engines.md keeps what was printed.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from bench_cases import (
    CASES,
    Case,
    Rounds,
    Spec,
    choose_best,
    expand,
    parse_case,
    parse_spec,
    plot,
    table,
    worse,
)
from bench_peers import ENGINES, Peer, Unusable, Where, log_of, prepare
from rich.console import Console
from rich.progress import Progress

from accel.commands.conditions import Conditions

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
QUIET = 0.25  # seconds before a turn: threads of the engine before it may spin for a while
SHAPES: dict[str, dict[str, Any]] = {
    "l213": dict(
        model_type="llama", vocab_size=32000, hidden_size=1024, intermediate_size=2816,
        num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=4,
        max_position_embeddings=8192, tie_word_embeddings=True,
    ),
    "qwen05": dict(
        model_type="qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864,
        num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        max_position_embeddings=32768, tie_word_embeddings=True, rope_theta=1000000.0,
        bos_token_id=151643, eos_token_id=151645,
    ),
    "moe175": dict(
        model_type="qwen3_moe", vocab_size=32000, hidden_size=512, intermediate_size=384,
        moe_intermediate_size=384, num_experts=32, num_experts_per_tok=4, norm_topk_prob=True,
        num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=8192, tie_word_embeddings=True,
    ),
}  # fmt: skip


@app.command()
def shape(
    name: Annotated[str, typer.Argument(help=" or ".join(SHAPES))], out: Path, seed: int = 0
) -> None:
    """Write a checkpoint of random weights: l213, a Llama of 213M, qwen05, of Qwen2.5-0.5B's shape, or
    moe175, 175M in mixtures of 32 experts of which a token chooses 4.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if name not in SHAPES:
        raise typer.BadParameter(f"no shape {name!r}; there are {', '.join(SHAPES)}")
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**SHAPES[name])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().save_pretrained(out)
    if config.model_type == "llama":
        write_words(out, config.vocab_size)


def write_words(out: Path, size: int) -> None:
    """A tokenizer of the made-up words that tools/peers/llama_cpp.py writes, for servers, which answer in text."""
    import tokenizers

    words = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    words += [f"t{i}" for i in range(size - len(words))]
    model = tokenizers.models.BPE(
        {word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True
    )
    found = tokenizers.Tokenizer(model)
    found.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    found.add_special_tokens(words[:3])
    found.save(str(out / "tokenizer.json"))
    facts = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (out / "tokenizer_config.json").write_text(json.dumps(facts))


@app.command()
def build(model: Path, rounds: int = 3) -> None:
    """Wall seconds and peak resident memory of a build in a fresh process, artifact written included."""
    checkpoint = sum(f.stat().st_size for f in model.glob("*.safetensors"))
    seconds, peaks = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=model.parent) as folder:
            start = time.perf_counter()
            command = [
                "accel-compile",
                "build",
                str(model),
                "--out",
                f"{folder}/artifact",
                "--json",
            ]
            worker = Path(sys.executable).with_name(command[0])
            done = subprocess.run([str(worker), *command[1:]], capture_output=True, text=True)
            seconds.append(time.perf_counter() - start)
            if done.returncode:
                raise typer.Exit(typer.echo(done.stderr, err=True) or 1)
            peaks.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
    print(
        "| model | checkpoint | seconds (median) | peak memory | peak / checkpoint |\n|---|---|---|---|---|"
    )
    print(
        f"| {model.name} | {checkpoint / 1e6:.0f} MB | {statistics.median(seconds):.1f} "
        f"| {max(peaks) / 1e6:.0f} MB | {max(peaks) / checkpoint:.2f} |"
    )


@app.command()
def peers(
    model: Annotated[
        Path, typer.Argument(help="checkpoint folder, as `shape` writes, or a GGUF file")
    ],
    engines: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ENGINE:VARIANT[=READY_MODEL]]...",
            help="The first is compared with the others. Default: accel:int4 and what is found of "
            + ", ".join(f"{n} ({', '.join(e.VARIANTS)})" for n, e in ENGINES.items() if e.VARIANTS)
            + "; with a GGUF file accel:base and "
            + ", ".join(f"{n} ({', '.join(e.GGUF)})" for n, e in ENGINES.items() if known_gguf(e)),
        ),
    ] = None,
    cache: Annotated[
        Path, typer.Option(help="keeps the models that are prepared, and logs")
    ] = Path("build/bench"),
    python: Annotated[
        list[str] | None,
        typer.Option(help="of an environment to look for engines in; again for more"),
    ] = None,
    packages: Annotated[
        list[Path] | None,
        typer.Option(help="folder of packages that engines may use after their environment's own"),
    ] = None,
    cases: Annotated[str, typer.Option(help="what to measure; xN for N rows")] = CASES,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    new: Annotated[int, typer.Option(min=1, help="decode steps of a turn; the median counts")] = 24,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    as_json: Annotated[Path | None, typer.Option("--json", help="write every round here")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="write a picture here")] = None,
) -> None:
    """Speed, load, memory and bytes side by side: engines take turns, ratios are medians of rounds' ratios.

    Models are prepared from the checkpoint where the cache has none that is up to date.
    """
    console = Console(stderr=True)
    try:
        wanted = [parse_case(c) for c in cases.split(",")]
        context, batch = limits(model, wanted, new)
        where = Where(tuple(python or ()), tuple(packages or ()), cache, threads)
        members, pythons = choose(engines or [], model, where, console)
        specs = list({s.name: s for many in members.values() for s in many}.values())
        bench = Bench(model, specs, pythons, where, rounds, new, console)
        bench.prepare(context, batch)
        measured = bench.measure(wanted)
    except (Unusable, ValueError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    results, chosen = choose_best(measured, members)
    print(table(results, chosen))
    if note := bench.agreement():
        print(f"\n{note}")
    print("".join(f"\n- {line}." for line in worse(results)) or "\naccel is worse in no case.")
    print(f"\n{bench.told()}")
    if as_json:
        found = {**bench.record(measured), "chosen": {str(c): s for c, s in chosen.items() if s}}
        as_json.write_text(json.dumps(found, indent=1) + "\n")
    if picture:
        plot(results, f"{model.name}, {threads} threads, {rounds} rounds", picture)


def limits(model: Path, cases: list[Case], new: int) -> tuple[int, int]:
    """The longest sequence and the most rows that the cases need. Raises ValueError."""
    if model.is_file():
        from accel.compiler.load.source import Gguf

        fields = Gguf(model).file.fields
        most = int(fields[f"{fields['general.architecture']}.context_length"])
    elif (model / "config.json").is_file():
        most = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    else:
        raise ValueError(
            f"{model} holds no config.json: give a checkpoint folder, as `shape` writes, or a GGUF file"
        )
    longest = max(cases, key=lambda c: c.tokens)
    need = longest.tokens + new + 8
    if need > most:
        raise ValueError(
            f"{longest} needs {need} positions and {model} has {most}: leave it out of --cases"
        )
    return min(most, -(-need // 256) * 256), max(c.batch for c in cases)


def known_gguf(engine: ModuleType) -> bool:
    """Whether an engine says how it runs GGUF files; accel runs all its recipes on them."""
    return hasattr(engine, "GGUF")


def choose(
    texts: list[str], model: Path, where: Where, console: Console
) -> tuple[dict[str, list[Spec]], dict[str, str]]:
    """What to measure, by what is compared, and the python of each engine. Raises Unusable, ValueError."""
    variants = {name: engine.VARIANTS for name, engine in ENGINES.items()}
    if model.is_file():
        variants = {n: e.GGUF for n, e in ENGINES.items() if known_gguf(e)} | {"accel": ()}
    pythons = where.find()
    if texts:
        specs = [parse_spec(text, variants) for text in texts]
        for spec in specs:
            if spec.engine not in pythons:
                raise where.missing(spec.engine)
    else:
        ours = "accel:base" if model.is_file() else "accel:int4"
        others = [n for n, known in variants.items() if known and n != "openvino"]
        specs = [parse_spec(t, variants) for t in (ours, *others) if t.partition(":")[0] in pythons]
        for name in sorted(set(variants) - set(pythons)):
            console.print(
                f"left out: {where.missing(name)}", style="dim", highlight=False, soft_wrap=True
            )
    if len({s.name for s in specs}) < len(specs):
        raise ValueError("an engine is given twice in the same variant: give each once")
    return expand(specs, variants), pythons


class Bench:
    """One comparison: engines in the order given, the first being ours."""

    def __init__(
        self, checkpoint: Path, specs: list[Spec], pythons: dict[str, str], where: Where,
        rounds: int, new: int, console: Console,
    ):  # fmt: skip
        self.checkpoint, self.specs, self.pythons, self.where = checkpoint, specs, pythons, where
        self.rounds, self.new, self.console = rounds, new, console
        self.models: dict[str, Path] = {}
        self.turns: list[dict[str, Any]] = []
        self.conditions = Conditions.now()
        if self.conditions.warning:
            console.print(self.conditions.warning, style="yellow", soft_wrap=True)

    def prepare(self, context: int, batch: int) -> None:
        for spec in self.specs:
            with self.console.status(f"preparing {spec.name}"):
                self.models[spec.name] = prepare(
                    spec, self.pythons[spec.engine], self.checkpoint, self.where, context, batch
                )

    def start(self, spec: Spec) -> Peer:
        log = log_of(spec, self.checkpoint, self.where)
        return Peer(spec, self.pythons[spec.engine], self.models[spec.name], self.where, log)

    def measure(self, cases: list[Case]) -> dict[Case, Rounds]:
        """By case and engine, a figure per round; for bytes, one."""
        results: dict[Case, Rounds] = {c: {s.name: [] for s in self.specs} for c in cases}
        fresh = [c for c in cases if c.kind in ("load", "memory")]
        speed = [c for c in cases if c.kind in ("decode", "prefill")]
        turns = self.rounds * len(self.specs) * (bool(fresh) + len(speed))
        with Progress(console=self.console, transient=True) as bar, ExitStack() as stack:
            task = bar.add_task("", total=turns)
            if fresh:
                for turn, spec in self.order():
                    bar.update(task, description=f"load, round {turn + 1}, {spec.name}")
                    with closing(self.start(spec)) as peer:
                        for case in fresh:
                            results[case][spec.name].append(self.cost(case, peer))
                    bar.advance(task)
            running: dict[str, Peer] = {}
            for spec in self.specs if speed else ():
                bar.update(task, description=f"starting {spec.name}")
                running[spec.name] = stack.enter_context(closing(self.start(spec)))
            for case in speed:
                for turn, spec in self.order():
                    bar.update(task, description=f"{case}, round {turn + 1}, {spec.name}")
                    results[case][spec.name].append(self.speed(case, running[spec.name], turn))
                    bar.advance(task)
        for case in cases:
            if case.kind == "bytes":
                results[case] = {s.name: [size(self.models[s.name]) / 1e6] for s in self.specs}
        return results

    def order(self) -> Iterator[tuple[int, Spec]]:
        """Every round begins with another engine."""
        for turn in range(self.rounds):
            first = turn % len(self.specs)
            for spec in self.specs[first:] + self.specs[:first]:
                yield turn, spec

    def cost(self, case: Case, peer: Peer) -> float:
        """Of a fresh process."""
        if case.kind == "load":
            self.turns.append({"case": str(case), "engine": peer.name, "load": peer.loaded})
            return peer.loaded
        shape = {"tokens": case.tokens, "batch": case.batch, "seed": 0}
        answer = peer.turn(new=8, **shape)
        self.turns.append({"case": str(case), "engine": peer.name, **answer})
        return float(answer["memory"]) / 1e6

    def speed(self, case: Case, peer: Peer, turn: int) -> float:
        time.sleep(QUIET)
        new = self.new if case.kind == "decode" else 0
        answer = peer.turn(tokens=case.tokens, batch=case.batch, new=new, seed=turn)
        self.turns.append({"case": str(case), "round": turn, "engine": peer.name, **answer})
        return case.figure(answer["steps"] if new else [answer["prefill"]])

    def agreement(self) -> str:
        """How often each peer picked the token that ours picked after the same prompt."""
        picked: dict[str, list[int]] = {s.name: [] for s in self.specs}
        for turn in sorted(self.turns, key=lambda t: (t["case"], t.get("round", 0))):
            picked[turn["engine"]] += turn.get("next", [])
        ours, *others = picked.values()
        if not ours or not others:
            return ""
        same = ", ".join(
            f"{name} {sum(a == b for a, b in zip(ours, picked[name], strict=True))} of {len(ours)}"
            for name in list(picked)[1:]
            if picked[name]  # it was not given text in place of tokens
        )
        if not same:
            return ""
        return f"Prompts after which the best next token is {self.specs[0].name}'s: {same}."

    def told(self) -> str:
        """Under which conditions it was measured."""
        self.conditions = self.conditions.ended()
        facts = [f"{name} {fact}" for name, fact in self.conditions.text() if name != "command"]
        warning = f" {self.conditions.warning.capitalize()}." if self.conditions.warning else ""
        what = (
            f"{self.where.threads} threads, {self.rounds} rounds; spread: least..most of the rounds"
        )
        return f"`{self.conditions.command}`: {'; '.join(facts)}; {what}.{warning}"

    def record(self, results: dict[Case, Rounds]) -> dict[str, Any]:
        return {
            "model": str(self.checkpoint),
            "threads": self.where.threads,
            "conditions": self.conditions.to_json(),
            "rounds": {str(case): rounds for case, rounds in results.items()},
            "turns": self.turns,
        }


def size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(f.stat().st_size for f in files if f.is_file())


if __name__ == "__main__":
    app()
