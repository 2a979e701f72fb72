"""Sampling and stop options as one object, with vLLM's names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict

from accel.ir.errors import InputError, shown
from accel.ir.facts import Facts
from accel.runtime.decode.logits_processors import LogitsProcessor
from accel.runtime.decode.structured_outputs import StructuredOutputsParams
from accel.runtime.inputs.ints import as_ints, check_vocabulary
from accel.runtime.inputs.prompts import as_count, as_eos, check_stops
from accel.runtime.sample import Base as SampleMethod
from accel.runtime.sample import named
from accel.runtime.sample.standard import Standard

MAX_TOKENS = 64
_LARGEST = 3e38  # of float32


@dataclass(frozen=True)
class SamplingParams:
    """Options of `generate` and `stream`. Raises InputError with the option, its value and the range.

    Args:
        max_tokens: maximum number of new tokens per prompt.
        temperature: sampling temperature; 0 is greedy decoding, whatever the other sampling options.
        top_k: sample from the k most likely tokens; None: all.
        top_p: sample from the most likely tokens with this total probability; None: all.
        min_p: sample from tokens with at least this fraction of the highest probability; None: all.
        repetition_penalty: above 1 penalises tokens of the prompt and the output.
        presence_penalty: lowers the logits of tokens that the output has by this much, -2 to 2; below 0 raises them.
        frequency_penalty: lowers them by this much for each time that it has them, -2 to 2.
        sampler: what is drawn from, of what the options above leave: `{"use": name, option: value, …}`, with the name
            and options of a recipe's `[sample]` (`accel-compile recipes`); None: the one of the model's recipe.
        seed: random seed for reproducible sampling; each prompt has its own generator from it.
        stop: strings that end a row; they are not part of its text.
        stop_token_ids: token ids that end a row, in addition to the model's own.
        ignore_eos: do not stop at the model's own end tokens.
        n: samples of each prompt, which runs once for all of them; above 1 only with a temperature. The first is what
            n = 1 gives.
        logprobs: give the log-probability of each new token and of this many likeliest ones, under the model's own
            distribution, before any option here (vLLM's `raw_logprobs`); 0: of the token alone; None: none.
        logit_bias: token id -> number added to its logit; -inf bans it.
        logits_processors: functions (token ids int64 [n], logits float32 [V]) -> logits [V], called one after the
            other before sampling. The ids, not to be written, are prompt and new tokens; the logits may be written.
            A function's result may depend on its arguments alone: with drafts it is called for tokens that then fall.
        structured_outputs: what the new text must be: a JSON schema, a regular expression, a choice, a grammar.
    """

    max_tokens: int = MAX_TOKENS
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    sampler: Mapping[str, Any] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: int | Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        as_count(self.max_tokens, "max_tokens", 1)
        if self.seed is not None:
            as_count(self.seed, "seed", 0)
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos = {shown(self.ignore_eos)}: give True or False")
        self.sampler_behind(0)  # checks its options
        check_stops(self.stop)
        as_count(self.n, "n", 1)
        if self.logprobs is not None:
            as_count(self.logprobs, "logprobs", 0)
        _check_bias(self.logit_bias)
        given = self.logits_processors
        if given is not None and not (isinstance(given, Sequence) and all(map(callable, given))):
            raise InputError(
                f"logits_processors = {shown(given)}: give a list of functions (token ids, logits) -> logits"
            )
        guide = self.structured_outputs
        if guide is not None and not isinstance(guide, StructuredOutputsParams):
            raise InputError(
                f"structured_outputs is {shown(guide)}; give accel.StructuredOutputsParams(…)"
            )

    @property
    def greedy(self) -> bool:
        """Whether nothing is ever drawn."""
        return self.temperature == 0

    def sampler_behind(self, prompt: int, default: SampleMethod = Standard()) -> SampleMethod:  # noqa: B008  (frozen)
        """The sampler of these options behind a prompt of so many tokens. `default`: the model's own."""
        method = default if self.sampler is None else named(self.sampler)
        said = {name: getattr(self, name) for name in method.by_request if name != "start"}
        return replace(method, **said, start=prompt)

    @property
    def token_by_token(self) -> list[str]:
        """The options given that only a loop which takes one token after the other can follow."""
        names = ("logprobs", "logit_bias", "logits_processors", "structured_outputs")
        return [name for name in names if getattr(self, name) not in (None, {}, [], ())]

    def ends(self, facts: Facts) -> tuple[int, ...]:
        """The token ids that end a row of this model. Raises InputError for an id outside its vocabulary."""
        more = as_ints(self.stop_token_ids, "stop_token_ids").reshape(-1)
        check_vocabulary(more, facts.vocab_size, "stop_token_ids")
        own = () if self.ignore_eos else tuple(facts.eos)
        return tuple(dict.fromkeys([*own, *more.tolist()]))


class SamplingOptions(TypedDict, total=False):
    """The options of `generate` and `stream` that say how tokens are picked and where they end: those of
    `SamplingParams`, or these as one object (`sampling_params`). `eos`: token ids that end a row and stay in its
    tokens; None: the model's own, []: none.
    """

    sampling_params: SamplingParams | None
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    sampler: Mapping[str, Any] | None
    seed: int | None
    stop: str | Sequence[str] | None
    eos: Any
    n: int
    logprobs: int | None
    logit_bias: Mapping[int, float] | None
    logits_processors: Sequence[LogitsProcessor] | None
    structured_outputs: StructuredOutputsParams | None


def sampling_params(
    facts: Facts, max_new_tokens: int, options: Mapping[str, Any]
) -> SamplingParams:
    """The object that `options` (of `SamplingOptions`) have, or one made of them. Raises InputError if both are set."""
    said = {"max_new_tokens": max_new_tokens, **options}
    given, eos = said.pop("sampling_params", None), said.get("eos")
    if given is None:
        own = eos is None
        ends = () if own else as_eos(eos, facts)
        limit = as_count(said.pop("max_new_tokens"), "max_new_tokens", 1)
        picks = {name: value for name, value in said.items() if name != "eos"}
        return SamplingParams(limit, **picks, stop_token_ids=ends, ignore_eos=not own)
    if not isinstance(given, SamplingParams):
        raise InputError(f"sampling_params is {shown(given)}; give accel.SamplingParams(…)")
    usual = {f.name: f.default for f in fields(SamplingParams)} | {
        "max_new_tokens": MAX_TOKENS,
        "eos": None,
    }
    if both := [name for name, value in said.items() if _given(value, usual[name])]:
        raise InputError(
            f"sampling_params and {', '.join(both)} were given; put all into accel.SamplingParams(…)"
        )
    return given


def _given(value: Any, usual: Any) -> bool:
    """Whether an option is not at its default; it may be an array, which does not compare."""
    return not isinstance(value, (int, float, str, type(None))) or value != usual


def _check_bias(bias: Any) -> None:
    """Raise InputError for what is no `logit_bias`."""
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        raise InputError(f"logit_bias = {shown(bias)}: give a dict of token id -> number")
    for token, value in bias.items():
        as_count(token, "logit_bias: token", 0)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not (value == -math.inf or abs(value) <= _LARGEST):
            raise InputError(
                f"logit_bias: token {token} has {shown(value)}; give a number, or -inf to ban the token"
            )
