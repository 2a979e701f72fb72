"""What a request asks for, checked before any work: its prompts, its encoder inputs, and a row for each sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.encoder import DETECT, EncoderFacts
from accel.ir.errors import InputError, shown, unknown
from accel.ir.facts import Facts
from accel.runtime.decode.judge import JudgeFunction
from accel.runtime.decode.logits_processors import Processed
from accel.runtime.decode.logprobs import TopLogprobs
from accel.runtime.decode.row import Row, tokens_of
from accel.runtime.decode.sampling_params import SamplingOptions, SamplingParams, sampling_params
from accel.runtime.decode.structured_outputs import Grammar
from accel.runtime.decode.timestamps import Timestamps
from accel.runtime.inputs.encoder_inputs import encoder_rows
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.prompts import as_prompts, as_stops, is_text, items_of
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import Base as Loop
from accel.runtime.model.sample import Sample
from accel.runtime.model.transcript import Transcript
from accel.runtime.prompt import Base as PromptMethod
from accel.runtime.prompt.plain import Plain
from accel.runtime.sample import Base as SampleMethod
from accel.runtime.sample import Sampler
from accel.runtime.session.prompt.filter import unseen
from accel.runtime.session.session import Session

PLAIN = Plain()

Sources = list[npt.NDArray[Any]] | None  # of an encoder, one for each prompt; None: there is none
Detect = Callable[[list[npt.NDArray[Any]]], list[int]]  # of each source, the token of its language


class RequestOptions(SamplingOptions, total=False):
    """The options of `generate` and `stream`."""

    encoder_input: Any
    language: str | Sequence[str] | None
    task: str | None
    timestamps: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    adapter: Any
    judge: JudgeFunction | None
    scorer: Any


@dataclass(frozen=True)
class PromptOptions:
    """Those of them that say no more than the prompt: see `CompiledModel.generate`."""

    encoder_input: Any = None
    language: str | Sequence[str] | None = None
    task: str | None = None
    timestamps: bool | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    adapter: Any = None
    judge: JudgeFunction | None = None
    scorer: Any = None


def parse_options(
    options: RequestOptions, max_new_tokens: int, facts: Facts
) -> tuple[SamplingParams, PromptOptions]:
    """How tokens are picked and where they end, and the rest. Raises InputError, also for an unknown option."""
    said: dict[str, Any] = dict(options)
    for name in said:
        if name not in RequestOptions.__annotations__:
            raise InputError(
                unknown("option", name, ["max_new_tokens", *RequestOptions.__annotations__])
            )
    own = {f.name for f in fields(PromptOptions)}
    given = PromptOptions(**{name: value for name, value in said.items() if name in own})
    rest = {name: value for name, value in said.items() if name not in own}
    return sampling_params(facts, max_new_tokens, rest), given


def sources_of(
    asked: PromptOptions,
    prompts: Any,
    facts: Facts,
    tokenizer: Tokenizer | None,
    detect: Detect,
) -> tuple[Sources, Any]:
    """The encoder's sources, and the prompts with the tokens that a decoder starts from. Raises InputError."""
    encoder_input = asked.encoder_input
    encoder = facts.encoder
    given = {"language": asked.language, "task": asked.task, "timestamps": asked.timestamps}
    named = [name for name, value in given.items() if value is not None]
    if named and (encoder is None or encoder.speech is None):
        raise InputError(
            f"{named[0]} is for models of speech whose generation configuration names languages, tasks or a token for "
            f"texts without times, and this one's names none; leave {named[0]} out"
        )
    if not isinstance(asked.timestamps, bool | None):
        raise InputError(f"timestamps is {shown(asked.timestamps)}; give True or False")
    sources = encoder_rows(encoder_input, encoder, tokenizer)
    if encoder is None or sources is None:
        if prompts is None:
            raise InputError("there is no prompt; give text, token ids, or a list of them")
        return None, prompts
    if prompts is None and not encoder.start:
        raise InputError("this model has no decoder start token; give a prompt of token ids")
    items = None if prompts is None else items_of(prompts, "prompts")
    if items is not None:
        check_one_each(sources, len(items))
        if not any(is_text(item) for item in items):
            if asked.language is not None or asked.task is not None:
                raise InputError(
                    "language and task are told by the tokens before a prompt, and this one is of token ids; give "
                    "text, or no prompt"
                )
            return sources, as_prompts(items, facts, tokenizer)
    starts = _starts(encoder, sources, asked, detect)
    return sources, starts if items is None else as_prompts(items, facts, tokenizer, starts)


def _starts(
    encoder: EncoderFacts, sources: list[npt.NDArray[Any]], asked: PromptOptions, detect: Detect
) -> list[list[int]]:
    """The tokens that the decoder of each source starts from. Raises InputError."""
    if encoder.speech is None:
        return [list(encoder.start)] * len(sources)
    language = asked.language
    several = isinstance(language, (list, tuple))
    named: list[Any] = list(language or ()) if several else [language] * len(sources)
    wrong = next((n for n in (*named, asked.task) if not isinstance(n, str | None)), None)
    if wrong is not None or len(named) != len(sources):
        raise InputError(
            f"language is {shown(language)} and task {shown(asked.task)}, for {len(sources)} encoder inputs; give "
            "names, or of languages a list of one for each input"
        )
    found = [encoder.speech.start(one, asked.task, asked.timestamps) for one in named]
    unknown_ = [i for i, start in enumerate(found) if DETECT in start]
    if unknown_:
        for i, token in zip(unknown_, detect([sources[i] for i in unknown_]), strict=True):
            found[i] = [token if one == DETECT else one for one in found[i]]
    return found


def check_one_each(sources: Sources, prompts: int) -> None:
    """Raise InputError where prompts lack a source, or sources a prompt."""
    if sources is not None and len(sources) != prompts:
        raise InputError(
            f"there are {len(sources)} encoder inputs but {prompts} prompts; give one for each prompt"
        )


def prompt_behind(
    session: Session, prompt: Any, adapter: Any, facts: Facts, tokenizer: Tokenizer | None
) -> Ints:
    """The tokens [n] that a session holds, and those of a prompt that follows them. Raises InputError."""
    held = session.tokens
    if held is None or len(held) != 1 or held[0].size != session.length:
        raise InputError(
            "the tokens of this session are not known, or it has run others since, or a recipe has dropped some; "
            "give one row that model.prompt_session or model.open_session gave, or a fork of it"
        )
    if adapter is not None:
        raise InputError("a session keeps its adapter; leave adapter out")
    if is_text(prompt):
        (ids,) = as_prompts(prompt, facts, tokenizer, [held[0].tolist()])
        if ids.size == held[0].size:
            raise InputError("the prompt is empty; give text that follows what the session holds")
        return ids
    (new,) = as_prompts([prompt], facts, tokenizer)
    return np.concatenate([held[0], new])


def check_makes_text(facts: Facts) -> None:
    """Raise InputError where a model gives vectors."""
    if facts.embedding is not None:
        raise InputError(
            f"{facts.name} gives vectors, and no text: use model.embed(texts), or build another model"
        )


def samples_of(
    prompts: Any,
    params: SamplingParams,
    facts: Facts,
    tokenizer: Tokenizer | None,
    loop: Loop,
    default: SampleMethod,
    marks: frozenset[int] = frozenset(),
    timestamps: bool | None = None,
    prompting: PromptMethod = PLAIN,
) -> list[Sample]:
    """`n` samples of each prompt, each prompt with its own generator from the seed, of which its later samples' are
    spawned. `loop`: the one that will make them; `default`: the model's sampler; `marks`: see `Transcript`;
    `timestamps`: of `PromptOptions`; `prompting`: what loops are given of prompts. Raises InputError.
    """
    check_makes_text(facts)
    loop.check(tokenizer)
    stops = as_stops(params.stop, tokenizer)
    ends, size = params.ends(facts), facts.vocab_size
    if (loop.masked_diffusion or loop.blocks) and (given := params.token_by_token):
        raise InputError(
            f"{', '.join(given)}: this model fills masks in any order, so no token is known to follow others; "
            "leave it unset, or take a causal model"
        )
    score = None if params.logprobs is None else TopLogprobs(params.logprobs, tokenizer)
    if params.n > 1 and params.greedy and "n" not in loop.takes:
        raise InputError(
            f"n = {params.n} with temperature 0 gives the same text {params.n} times; give a temperature above 0, or "
            "build with a recipe that writes several, such as 'superposed'"
        )
    if loop.writes and params.structured_outputs is not None:
        raise InputError(
            "structured_outputs: this model's loop also writes text that was not sampled, which a grammar cannot "
            "rule; leave it unset, or build with another [loop]"
        )
    grammar = None
    if params.structured_outputs is not None:
        grammar = Grammar(params.structured_outputs, tokenizer, size)
    bias, processors = params.logit_bias, params.logits_processors or ()
    samples = []
    for prompt in as_prompts(prompts, facts, tokenizer):
        prompt = read_by_loop(prompting, prompt, facts)
        rng = np.random.default_rng(params.seed)
        for generator in [rng, *rng.spawn(params.n - 1)]:
            sampler: Sampler = params.sampler_behind(prompt.size, default)
            times = _times(facts, timestamps, prompt.size)
            if bias or processors or grammar or facts.suppressed or times:
                guide = None if grammar is None else grammar.begin(prompt.size, ends)
                start = None if loop.masked_diffusion or loop.blocks else prompt.size
                sampler = Processed(
                    sampler, size, bias, processors, guide, facts.suppressed, start, times
                )
            script = Transcript(tokenizer, stops, tokens_of(prompt, size), marks)
            row = Row(
                prompt,
                sampler,
                generator,
                limit=params.max_tokens,
                max_context=facts.max_context + unseen(facts.prefill, prompt.size),
                eos=ends,
                watch=script if tokenizer else None,
                score=score,
                vocab_size=size,
            )
            own = () if params.ignore_eos else facts.eos
            samples.append(Sample(row, script, frozenset(own)))
    return samples


def read_by_loop(prompting: PromptMethod, prompt: Ints, facts: Facts) -> Ints:
    """What a loop gets of a prompt [n], an array of its own: it says whose samples rows are. Raises InputError."""
    found = prompting.read(prompt, facts.vocab_size)
    if found.size > facts.max_context:
        raise InputError(
            f"a prompt has {prompt.size} tokens, and {found.size} with those that {prompting.full_name} adds; "
            f"max_context is {facts.max_context}. Shorten it, or build with more: max_context=…"
        )
    return found.copy() if found is prompt else found


def check_text(prompting: PromptMethod, row: Row, facts: Facts) -> None:
    """Raise InputError where a prompt had ids behind the vocabulary before `prompting` added its own: an engine scores
    and sends on a prompt's text.
    """
    if not np.array_equal(prompting.read(row.prompt_text, facts.vocab_size), row.prompt):
        raise InputError(
            f"the prompt has token ids of {facts.vocab_size} and more, which only a model's recipe adds to requests; "
            "leave them out"
        )


def _times(facts: Facts, asked: bool | None, start: int) -> Timestamps | None:
    """Where times may stand in a text behind `start` tokens; None: it has none. Raises InputError."""
    speech = None if facts.encoder is None else facts.encoder.speech
    if speech is None or speech.last is None or not speech.has_times(asked):
        return None
    zero = speech.last + 1
    if not facts.eos or zero >= facts.vocab_size:
        lacks = "an eos_token_id" if not facts.eos else "tokens above no_timestamps_token_id"
        raise InputError(f"timestamps: this model lacks {lacks}; give timestamps=False")
    return Timestamps(zero, facts.eos[0], start, speech.latest)
