"""What the bundled model reads: the standard library's sources and recall tasks, in stages."""

from __future__ import annotations

import importlib.util
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

REFERENCE = Path(__file__).resolve().parents[1] / "api" / "reference"
BOS, EOS, PAD = 0, 1, 2
SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>"]
HELD_OUT = (
    "bisect.py",
    "calendar.py",
    "csv.py",
    "fractions.py",
    "heapq.py",
    "json/encoder.py",
    "queue.py",
    "sched.py",
    "shlex.py",
    "textwrap.py",
    "wsgiref/handlers.py",
    "xml/dom/pulldom.py",
)
SKIPPED = {"test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data"}


def _load_tasks() -> ModuleType:
    """By path, so that training runs from a checkout which is not installed."""
    spec = importlib.util.spec_from_file_location("reference_tasks", REFERENCE / "tasks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tasks = _load_tasks()


def sources() -> tuple[list[str], list[str]]:
    """The texts of the standard library to train on, and of `HELD_OUT`."""
    root = Path(sysconfig.get_path("stdlib"))
    train = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED.isdisjoint(name.parts) and name.as_posix() not in HELD_OUT:
            train.append(path.read_text(encoding="utf-8", errors="ignore"))
    return train, [(root / name).read_text(encoding="utf-8") for name in HELD_OUT]


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """Byte-level BPE; digits stand alone; task text is mixed in so that its words stay whole."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = "".join(f"{word}: {word}\n" for word in tasks.WORDS) * 400
    tokenizer.train_from_iterator([*texts, words], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[BOS]} $A", special_tokens=[(SPECIAL[BOS], BOS)]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts in one row of ids, each between <|bos|> and <|eos|>."""
    rows = [[*row.ids, EOS] for row in tokenizer.encode_batch(texts)]
    return np.array([token for row in rows for token in row], dtype=np.int32)


@dataclass(frozen=True)
class Stage:
    """One part of the curriculum: it holds until this share of the time has passed.

    `mix` weighs the kinds of row. Only the first `depth` layers run: the others, which begin as
    the identity, join later, so that the first steps, many and short, are cheap.
    `exits` scales the early-exit loss and `drop` is the layer dropout of the last layer.
    """

    until: float
    length: int
    rows: int
    depth: int
    mix: dict[str, float]
    exits: float = 0.0
    drop: float = 0.0


def _mix(repeat: float, code: float, key_value: float) -> dict[str, float]:
    rest = {"copy": 1.0, "pass_key": 1.0, "edit": 1.0}
    return {"repeat": repeat, "code": code, "key_value": key_value, **rest}


STAGES = (
    Stage(0.25, 256, 8, 4, _mix(0.5, 8, 2)),
    Stage(0.5, 256, 8, 6, _mix(0.5, 8, 2), exits=0.1),
    Stage(0.65, 512, 4, 8, _mix(0.5, 8, 2), exits=0.3, drop=0.05),
    Stage(1.0, 1536, 2, 8, _mix(0.5, 6, 2), exits=0.3, drop=0.1),
)


def stage_at(progress: float) -> Stage:
    return next((stage for stage in STAGES if progress < stage.until), STAGES[-1])


class Batches:
    """Rows `(ids [B,T+1], weights [B,T])`, a function of the seed and of the calls so far.

    A weight is 0 where a token cannot be known from those before it (and on padding).
    """

    def __init__(self, tokenizer: Tokenizer, corpus: np.ndarray, seed: int, scale: int = 1) -> None:
        self.tokenizer, self.corpus, self.rng = tokenizer, corpus, random.Random(seed)
        self.scale = scale

    def draw(self, stage: Stage) -> tuple[Tensor, Tensor]:
        count = self.scale * stage.rows
        kinds = self.rng.choices(list(stage.mix), list(stage.mix.values()), k=count)
        rows = [self._row(kind, stage.length + 1) for kind in kinds]
        ids = torch.tensor(np.stack([ids for ids, _ in rows]), dtype=torch.long)
        return ids, torch.tensor(np.stack([weights for _, weights in rows]))[:, 1:]

    def _row(self, kind: str, size: int) -> tuple[np.ndarray, np.ndarray]:
        if kind == "code":
            start = self.rng.randrange(len(self.corpus) - size)
            return self.corpus[start : start + size], np.ones(size, dtype=np.float32)
        marked = self._repeat(size) if kind == "repeat" else self._task(kind, size)
        ids = np.full(size, PAD, dtype=np.int32)
        weights = np.zeros(size, dtype=np.float32)
        pairs = list(marked)[:size]
        ids[: len(pairs)] = [token for token, _ in pairs]
        weights[: len(pairs)] = [float(known) for _, known in pairs]
        return ids, weights

    def _repeat(self, size: int) -> Iterator[tuple[int, bool]]:
        """A passage of a small random alphabet, over and over; known from its second time on."""
        low = len(SPECIAL)
        alphabet = self.rng.sample(range(low, self.tokenizer.get_vocab_size()), 64)
        period = self.rng.randrange(6, size // 2)
        passage = self.rng.choices(alphabet, k=period)
        yield BOS, False
        for at in range(size):
            yield passage[at % period], at > period

    def _task(self, kind: str, size: int) -> Iterator[tuple[int, bool]]:
        """One task to a row: a body of random length, then questions as far as the row goes."""
        yield BOS, False
        room = self.rng.randrange(24, max(25, size * 7 // 8))
        lines = tasks.lines_for(kind, room)
        most = 2 if kind == "pass_key" else size  # further ones would only repeat the first
        answers = min(most, max(1, (size - room) // tasks.TOKENS_PER_LINE[kind]))
        for text, is_answer in tasks.TASKS[kind](self.rng, lines, answers):
            for token in self.tokenizer.encode(text, add_special_tokens=False).ids:
                yield token, is_answer
