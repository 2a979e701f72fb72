"""A compiled model: generate, stream, logits, sessions, save."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any, Unpack

import numpy as np

from accel.ir.axis import host_method
from accel.ir.errors import ArtifactError, InputError, shown
from accel.ir.facts import Facts
from accel.runtime.artifact.artifact import Artifact, copy_artifact
from accel.runtime.artifact.shipped import located
from accel.runtime.backends.protocol import Backend
from accel.runtime.backends.tuning import Tuning
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.costs import Costs, known, measured
from accel.runtime.decode.judge import Judge, JudgeFunction
from accel.runtime.decode.logprobs import TopLogprobs
from accel.runtime.decode.pool import groups
from accel.runtime.decode.prompt_scores import PromptScores
from accel.runtime.decode.sampling_params import MAX_TOKENS, SamplingParams
from accel.runtime.decode.scorer import Scorer
from accel.runtime.inputs.encoder_inputs import encoder_rows
from accel.runtime.inputs.ints import Ints, as_ints
from accel.runtime.inputs.prompts import (
    as_count,
    as_prompts,
    is_conversation,
    is_text,
    items_of,
    without_messages,
)
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import HOST, chosen
from accel.runtime.loop import Base as Loop
from accel.runtime.model.adapters import Adapters
from accel.runtime.model.chat import Chat
from accel.runtime.model.embed import Vectors, embedded, embedding_of, pairs
from accel.runtime.model.meter import Meter
from accel.runtime.model.notebook import model_table
from accel.runtime.model.output import Output
from accel.runtime.model.requests import (
    PromptOptions,
    RequestOptions,
    Sources,
    check_makes_text,
    check_one_each,
    check_text,
    parse_options,
    prompt_behind,
    samples_of,
    sources_of,
)
from accel.runtime.model.retranslate import Retranslation
from accel.runtime.model.sample import Prepared, Sample
from accel.runtime.model.sessions import Sessions
from accel.runtime.model.stream import Stream
from accel.runtime.model.transcript import pieces
from accel.runtime.prompt import Base as PromptMethod
from accel.runtime.sample import Base as SampleMethod
from accel.runtime.session.chunks import HEAD, Chunk, Wire
from accel.runtime.session.saved import imported, saved_session
from accel.runtime.session.session import Session


class CompiledModel:
    """A compiled model, as `accel.optimize` and `accel.load` return it.

    It may be used from several threads. Each session must be used by one thread at a time.
    """

    def __init__(
        self,
        backend: Backend,
        facts: Facts,
        *,
        tokenizer: Tokenizer | None = None,
        recipe: dict[str, Any] | None = None,
        report: dict[str, Any] | None = None,
        program: Any = None,
        artifact: Artifact | None = None,
        draft_model: CompiledModel | None = None,
        on_close: Callable[[], None] | None = None,
        adapters: Adapters | None = None,
        weights: Callable[[], str] | None = None,
    ):
        """`recipe`: its JSON form, for the loop it names; `artifact`: what `save` copies;
        `draft_model`: the model that drafts, closed with this one; `on_close`: clean up after;
        `adapters`: those that sessions choose; `weights`: a digest of the parameters, where there is no artifact.
        """
        self.facts = facts
        self.tokenizer = tokenizer
        self.recipe = recipe or {}
        self.report = report if report is not None else {}
        self.program = program
        self.artifact = artifact
        self.draft_model = draft_model
        self._on_close = on_close
        tables = self.recipe.get("tables", {})
        if artifact is not None:
            tables = located(tables, HOST, artifact.path, artifact.files)
        self._loop, self._methods = chosen(tables)
        self._sampler: SampleMethod = host_method(tables, "sample", "standard")
        self._prompting: PromptMethod = host_method(tables, "prompt", "plain")
        self._store = self._methods.get("draft", self._loop).store(facts, tokenizer)
        self._sessions = Sessions(backend, facts, self.recipe, artifact, adapters, weights)
        self._costs: Costs | None = None

    def generate(
        self,
        prompts: Any = None,
        max_new_tokens: int = MAX_TOKENS,
        **options: Unpack[RequestOptions],
    ) -> Output:
        """Continue prompts. Each prompt gets the tokens that it would get alone.

        Args:
            prompts: text, token ids [n], messages (a list of dicts with "role" and "content", for the model's
                chat template), or a list of those. For an encoder-decoder model: the start
                of the decoder's output, after the model's start tokens if it is text (default: the
                start tokens alone).
            max_new_tokens: maximum number of new tokens per prompt, at least 1. A row also ends at
                an `eos` token, a `stop` string or the end of the context.
            encoder_input: for an encoder-decoder model, one per prompt: text, token ids [n], features,
                or a list of those.
            language, task: of a speech model such as Whisper: the language that is spoken ("en", "english" or the
                token), or a list with one for each input, and "transcribe" or "translate". None: as its generation
                configuration says; a language that this leaves open is detected, for which the encoder runs twice.
            timestamps: of a speech model: whether its text has the tokens of times, as Whisper's `<|0.00|>`, at the
                beginning and end of each piece. None: as `return_timestamps` of its generation configuration says.
            chat_template_kwargs: with messages: arguments of `Tokenizer.apply_chat_template`, such as
                `tools`, and variables of the template.
            adapter: the name of an adapter that the model was built with or that `load_adapter` added
                (`adapters` lists them), or a list with one for each prompt. None: the model without.
            sampling_params: all options below as one object; do not combine it with them.
            temperature: sampling temperature; 0 is greedy decoding.
            top_k: sample from the k most likely tokens (None: all).
            top_p: sample from the most likely tokens with this total probability (None: all).
            min_p: sample from tokens with at least this fraction of the highest probability (None: all).
            repetition_penalty: above 1 penalises tokens that already occurred.
            presence_penalty, frequency_penalty: as in `SamplingParams`; the prompt's tokens do not count.
            sampler: `{"use": name, option: value, …}`, as in `SamplingParams`. None: that of the model's recipe.
            seed: random seed; sampling is reproducible with it.
            stop: strings that end a row; they are not part of the text.
            eos: token ids that end a row and stay in its tokens. None: the model's own; []: none.
            n, logprobs, logit_bias, logits_processors, structured_outputs: as in `SamplingParams`.
            judge: a function (drafted text, the model's own text) -> bool: whether the first may stand for the second;
                for a model whose loop drafts steps of text (`lookahead-reasoning`). None: the loop's own rule.
            scorer: a function (prompt, texts behind it) -> a number for each, the higher the better, or a model that
                compares two texts; for a loop that searches by it (`a-star-decoding`). None: the loop's own score.

        Raises:
            InputError: a prompt or an option is out of range.
        """
        params, given = parse_options(options, max_new_tokens, self.facts)
        prompts = without_messages(prompts, self.tokenizer, given.chat_template_kwargs)
        sources, prompts = self._sources(given, prompts)
        samples = self._samples(prompts, params, timestamps=given.timestamps)
        names = self._sessions.named(given.adapter, len(samples) // params.n)
        context = self._context(given.judge, given.scorer)
        meter = Meter(self.tuning, context.costs)
        for _ in self._decode(samples, params.n, sources, names, meter, context):
            pass
        return Output(
            tokens=[one.row.tokens for one in samples],
            text=None
            if self.tokenizer is None
            else [one.script.text(one.row.tokens) for one in samples],
            stats=meter.stats([one.row for one in samples]),
            finish_reason=[one.finish_reason or "" for one in samples],
            stop_reason=[one.stop_reason for one in samples],
            logprobs=None if params.logprobs is None else [one.row.logprobs for one in samples],
        )

    def stream(
        self,
        prompt: Any = None,
        max_new_tokens: int = MAX_TOKENS,
        *,
        session: Session | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Like `generate`, for one prompt: iterate over pieces of text (text prompt, or messages) or token ids.

        The session is freed when the iteration ends or by `close()`. `stats` holds the statistics so
        far. Raises InputError.

        `session`: one that `prompt_session` or `open_session` gave. The prompt then follows its tokens, which are not
        run again, and its adapter is used. It holds the new tokens afterwards and stays open: give a `fork()` to keep
        it as it is.
        """
        params, given = parse_options(options, max_new_tokens, self.facts)
        text = is_text(prompt) or (
            isinstance(prompt, (list, tuple))
            and any(is_text(one) or is_conversation(one) for one in prompt[:1])
        )
        text = text or is_conversation(prompt) or (prompt is None and self.tokenizer is not None)
        prompt = without_messages(prompt, self.tokenizer, given.chat_template_kwargs)
        sources, prompt = self._sources(given, prompt)
        names = self._sessions.named(given.adapter, 1)
        if session is not None:
            prompt = prompt_behind(session, prompt, given.adapter, self.facts, self.tokenizer)
        return self._stream(prompt, params, text, sources, names, session, given)

    def retranslate(
        self,
        pieces: Iterable[Any],
        max_new_tokens: int = MAX_TOKENS,
        *,
        suffix: Sequence[int] = (),
        **options: Unpack[RequestOptions],
    ) -> Retranslation:
        """Translate a source that arrives in pieces anew with each (arXiv:2012.14681): iterate over a `Translation` for
        each piece, with what of the one before stays. Each is what `generate` gives for the source so far, by any loop.

        Args:
            pieces: text (with the spaces between pieces) or lists of token ids; an iterator is asked for the next piece
                when the translation so far has been taken.
            suffix: with token ids: those that end a source, such as the end token, put behind what there is of it.
            options: those of `generate`, without `encoder_input` and `n`.

        Raises:
            InputError: the model has no encoder over tokens, a piece is empty, or an option is out of range.
        """
        if "encoder_input" in options or options.get("n", 1) != 1:
            raise InputError(
                "retranslate makes one text of the pieces; leave encoder_input and n out, or use generate"
            )
        parse_options(options, max_new_tokens, self.facts)

        def generate(source: Ints) -> Output:
            own = RequestOptions(**options)
            own["encoder_input"] = [source]
            return self.generate(None, max_new_tokens, **own)

        return Retranslation(pieces, generate, self.facts, self.tokenizer, suffix)

    def chat(
        self,
        system: str | None = None,
        *,
        adapter: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Chat:
        """A conversation, whose turns run only the tokens that are new. Close it or use it in a `with` statement.

        Args:
            system: the system message; None: none.
            adapter: the name of the adapter that all turns use, as in `generate`.
            chat_template_kwargs: arguments of `Tokenizer.apply_chat_template`, such as `tools` or `chat_template`.

        Raises:
            InputError: the model has no tokenizer or no such adapter, or its kind cannot hold a conversation.
        """
        check_makes_text(self.facts)
        if self.tokenizer is None:
            raise InputError(
                "chat needs a tokenizer, but this model has none; build with tokenizer=…"
            )
        if self.facts.encoder is not None:
            raise InputError("this model is an encoder-decoder; give `generate` an encoder_input")
        if self._loop.masked_diffusion:
            raise InputError(
                "this model fills masks, so no turn goes on from the one before; give `generate` the messages"
            )

        names = self._sessions.named(adapter, 1)

        def start(ids: Ints, params: SamplingParams, session: Session) -> Stream:
            return self._stream(ids, params, True, None, names, session)

        return Chat(
            self.tokenizer,
            self.facts.max_context,
            lambda: self.session(adapter=adapter),
            start,
            self.facts.vocab_size,
            system,
            chat_template_kwargs,
        )

    def logits(self, tokens: Any, *, encoder_input: Any = None, adapter: Any = None) -> Logits:
        """Logits float32 [B,T,V] after each of tokens [B,T], from an empty cache.

        B may exceed `max_batch`. An encoder-decoder model needs an `encoder_input` per row, as in
        `generate`; `adapter` too is as there. Raises InputError.
        """
        check_makes_text(self.facts)
        ids = as_ints(tokens, "tokens")
        if ids.ndim != 2 or not ids.size:
            raise InputError(
                f"tokens have shape {list(ids.shape)}; logits takes [B, T] with B >= 1 and T >= 1"
            )
        sources = encoder_rows(encoder_input, self.facts.encoder, self.tokenizer)
        check_one_each(sources, len(ids))
        names = self._sessions.named(adapter, len(ids))
        out = []
        for start in range(0, len(ids), self.facts.max_batch):
            part = slice(start, start + self.facts.max_batch)
            own_sources = None if sources is None else sources[part]
            with self._sessions.encoded(own_sources, names[part]) as session:
                out.append(session.run(ids[part]))
        return out[0] if len(out) == 1 else np.concatenate(out)

    def embed(
        self,
        texts: Any,
        *,
        dimensions: int | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> Vectors:
        """Vectors float32 [n,E] of texts, of a model that was built to give them.

        Args:
            texts: text, token ids [n], or a list of either. Texts of about one length run together, up to `max_batch`.
            dimensions: give the first so many numbers of each vector, brought to length 1 again, as models that were
                trained for it (Matryoshka, arXiv:2205.13147) allow. None: all.
            before: called before each batch; what it raises ends the work.

        Raises:
            InputError: the model makes text, or a text is empty or longer than `max_context`; with its place.
        """
        how = embedding_of(self.facts)
        if how.pairs is not None and any(isinstance(one, str) for one in items_of(texts, "texts")):
            raise InputError(f"{self.facts.name} compares two texts: use model.score(query, texts)")
        self._sessions.live_backend()
        ids = as_prompts(texts, self.facts, self.tokenizer, what="text")
        return embedded(ids, self.facts, self.session, dimensions, before)

    def score(self, query: str, texts: Sequence[str]) -> Vectors:
        """How well each of the texts answers a query, float32 [n], of a model that was built of a cross-encoder.

        Raises:
            InputError: it is none, or a pair is longer than `max_context`; with its place.
        """
        return self.embed(pairs(query, texts, self.facts, self.tokenizer))[:, 0]

    def session(self, batch: int = 1, adapter: Any = None) -> Session:
        """An empty session of `batch` rows, at most `max_batch`. Close it or use it in a `with` statement.

        `adapter`: the name of an adapter, or a list with one for each row, as in `generate`; the session keeps it.
        Raises InputError.
        """
        self._sessions.live_backend()
        if isinstance(batch, int) and batch > self.facts.max_batch:
            raise InputError(
                f"batch = {shown(batch)} is more than max_batch = {self.facts.max_batch}; "
                "build with more: max_batch=…"
            )
        as_count(batch, "batch", 1)
        return self._sessions.open(self._sessions.named(adapter, int(batch)))

    def prompt_session(
        self,
        prompt: Any,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | None = None,
    ) -> Session:
        """A session of one row that holds a prompt (text, token ids [n] or messages): to be saved, forked, or given to
        `stream`. Close it or use it in a `with` statement. Raises InputError.
        """
        (ids,) = as_prompts(
            [without_messages(prompt, self.tokenizer, chat_template_kwargs)],
            self.facts,
            self.tokenizer,
        )
        session = self.session(adapter=adapter)
        try:
            session.prompt(ids[None])
        except BaseException:
            session.close()
            raise
        session.tokens = [ids]
        return session

    def open_session(self, path: str | os.PathLike[str]) -> Session:
        """A session that goes on from a file that `session.save` wrote: the same rows, tokens and adapters, and the
        logits that the saved one would have given. Its stats start at 0.

        The file is mapped and checked, which takes milliseconds where a long prompt takes seconds. Open only files that
        you or someone you trust wrote.

        Raises SavedSessionError: the file is missing, cut, damaged, of another version, model, recipe or adapter, or
        has more rows than `max_batch` or more tokens than `max_context`.
        """
        self._sessions.live_backend()
        return self._sessions.resumed(saved_session(path))

    def import_row(self, data: bytes) -> Session:
        """A session of one row that goes on from what `session.export_row` gave, of this model in any process; it may
        join others (`session.join`). Its stats start at 0. Take only bytes of someone you trust.

        Raises SavedSessionError: the bytes are cut, damaged, or of another version, model, recipe or adapter.
        """
        self._sessions.live_backend()
        return self._sessions.resumed(imported(data))

    def import_chunks(
        self, fetch: Callable[[str], bytes], seconds: float, speed: float | None = None
    ) -> tuple[Session, list[Chunk]]:
        """A session that goes on from what `session.export_chunks` gave, and what was fetched of each chunk: the level
        that loses least with which all chunks come within `seconds`, at the bandwidth of the part before, or, where
        that is as fast, its tokens, which are computed; where nothing is fast enough, what is fastest.

        `fetch`: gives the part of a name. `speed`: tokens of a prompt that the model computes in a second (default:
        measured). Take only parts of someone you trust. Raises SavedSessionError, as `open_session`.
        """
        self._sessions.live_backend()
        wire = Wire(fetch, 0.0, speed or 0.0)
        ends = wire.clock() + seconds
        saved = imported(wire.get(HEAD)[0])
        session = self._sessions.received(saved)
        try:
            if speed is None and saved.tokens is not None:
                wire.speed = self._prompt_speed(saved.tokens[0])
            return session, session.import_chunks(saved, wire, ends)
        except BaseException:
            session.close()
            raise

    def _prompt_speed(self, tokens: Ints) -> float:
        """Tokens of a prompt a second, as far as a beginning of this one tells; the first call opens the graphs."""
        few = tokens[None, :64]
        for _ in range(2):
            with self.session() as session:
                begun = time.perf_counter()
                session.prompt(few)
                spent = time.perf_counter() - begun
        return few.size / max(spent, 1e-9)

    @property
    def pool(self) -> dict[str, int] | None:
        """Statistics of the blocks or prompts that the model's sessions share (`kv.reuse`); None: they share none."""
        return self._sessions.shared()

    @property
    def tuning(self) -> Tuning | None:
        """The selected kernel variant, the reason, and its measured costs on this machine. Measured on first
        use, in under two seconds. None for a model without an artifact.
        """
        backend = self._sessions.backend
        return None if backend is None else backend.tuning

    @property
    def threads(self) -> int | None:
        """Compute threads of a call; None where they are not the model's own (a target other than ONNX Runtime)."""
        backend = self._sessions.backend
        return None if backend is None else backend.threads

    @property
    def costs(self) -> Costs:
        """The cost of a call of 1..32 tokens on this machine.

        Measured on first use (or by the first `generate` of a model that drafts) in a few seconds, on the first
        loads on a machine, then cached. Raises InputError if the model is closed.
        """
        if self._costs is None:
            backend = self._sessions.live_backend()
            before = self._costs_before
            if before is None or not before.sure:
                before = measured(backend.open_session(1), self.facts, self._cost_key)
            self._costs = before
        return self._costs

    @property
    def _cost_key(self) -> dict[str, Any] | None:
        backend = self._sessions.backend
        return None if backend is None else backend.cost_key

    def _context(self, judge: JudgeFunction | None = None, scorer: Any = None) -> DecodeContext:
        """What the loop is given for a request; costs are measured where it goes by them. Raises InputError."""
        if judge is not None and "judge" not in self._loop.takes:
            raise InputError(
                "judge: this model's loop drafts no steps of text that it could judge; leave it out, or build with the "
                "recipe 'lookahead-reasoning'"
            )
        if scorer is not None and "scorer" not in self._loop.takes:
            raise InputError(
                "scorer: this model's loop compares no texts by a score; leave it out, or build with a recipe that "
                "does, such as 'a-star-decoding'"
            )
        self._loop.fit(self)
        return DecodeContext(
            self._methods,
            self.costs if self._loop.weighs else self._costs or self._costs_before,
            self,
            self._store,
            None if judge is None else Judge(judge),
            None if scorer is None else Scorer(scorer),
        )

    def decoding(self) -> tuple[Loop, DecodeContext]:
        """For an engine (`accel.runtime.serve`): the recipe's loop, and what it is given for any request. Costs are
        measured where it goes by them. Raises InputError.
        """
        return self._loop, self._context()

    def prepare(
        self,
        prompt: Any,
        params: SamplingParams,
        *,
        encoder_input: Any = None,
        adapter: str | None = None,
        sample: int = 0,
        marks: frozenset[int] = frozenset(),
        prompt_logprobs: int | None = None,
    ) -> Prepared:
        """One sample of one prompt, checked before any work, for an engine (`accel.runtime.serve`); arguments as of
        `generate`. `sample`: which of the samples of this seed; `marks`: see `Transcript`; `prompt_logprobs`: see
        `Request`. Raises InputError.
        """
        if params.n != 1:
            raise InputError(
                f"n = {params.n}: an engine takes a request for each sample; leave n at 1"
            )
        as_count(sample, "sample", 0)
        sources, prompt = self._sources(PromptOptions(encoder_input, adapter=adapter), prompt)
        samples = self._samples(prompt, params, marks)
        if len(samples) != 1:
            raise InputError(f"a request has one prompt, not {len(samples)}; give each its own")
        check_text(self._prompting, samples[0].row, self.facts)
        if sample:
            row = samples[0].row
            row.rng = row.rng.spawn(sample)[-1]
        names = self._sessions.named(adapter, 1)
        scores = None
        if prompt_logprobs is not None:
            if self._loop.masked_diffusion:
                raise InputError(
                    "prompt_logprobs: this model fills masks, so no token of a prompt follows from those before it; "
                    "leave it unset, or take a causal model"
                )
            count = as_count(prompt_logprobs, "prompt_logprobs", 0)
            scores = PromptScores(samples[0].row.prompt_text, TopLogprobs(count, self.tokenizer))
        known = partial(self._sessions.known, names, samples[0].row.prompt)
        return Prepared(samples[0], self._sessions.opener(sources, names), known, scores)

    def _sources(self, asked: PromptOptions, prompts: Any) -> tuple[Sources, Any]:
        """See `sources_of`."""
        detect = partial(self._sessions.languages, asked.adapter)
        return sources_of(asked, prompts, self.facts, self.tokenizer, detect)

    @cached_property
    def _costs_before(self) -> Costs | None:
        """As other loads measured them on this machine."""
        return known(self._cost_key)

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that a session may choose."""
        return self._sessions.adapter_names

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Let sessions that open from now on choose the LoRA adapter of a folder that `peft` saved, by this name. It
        may adapt the modules that the adapters of the build adapt. One of the same name is replaced; sessions that use
        it keep it. `save` does not write it. Raises InputError.
        """
        self._sessions.load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        """Take away an adapter that `load_adapter` brought: no session that opens from now on may choose it. Sessions
        that use it, and requests that an engine has taken, keep it until they end. Raises InputError.
        """
        self._sessions.unload_adapter(name)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the artifact to a folder, atomically. Raises ArtifactError."""
        if self.artifact is None:
            raise ArtifactError(
                "this model has no artifact to save; build it with accel.optimize(…, target='onnx')"
            )
        copy_artifact(self.artifact, path)

    def close(self) -> None:
        """Free the weights and temporary files. Closing twice is harmless."""
        self._store = None
        if self._sessions.backend is not None:
            self._sessions.close()
            if self.draft_model is not None:
                self.draft_model.close()
            if self._on_close is not None:
                self._on_close()

    def __enter__(self) -> CompiledModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        facts = self.facts
        return (
            f"CompiledModel({facts.name}, vocabulary {facts.vocab_size}, "
            f"context {facts.max_context}, batch {facts.max_batch})"
        )

    def _repr_html_(self) -> str:
        return model_table(self.facts, self.recipe, self.report)

    def _samples(
        self,
        prompts: Any,
        params: SamplingParams,
        marks: frozenset[int] = frozenset(),
        timestamps: bool | None = None,
    ) -> list[Sample]:
        """What will be made, checked before any work. Raises InputError, also if the model is closed."""
        self._sessions.live_backend()
        return samples_of(
            prompts,
            params,
            self.facts,
            self.tokenizer,
            self._loop,
            self._sampler,
            marks,
            timestamps,
            self._prompting,
        )

    def _stream(
        self,
        prompt: Any,
        params: SamplingParams,
        text: bool,
        sources: Sources,
        names: list[str | None],
        session: Session | None = None,
        prompt_options: PromptOptions | None = None,
    ) -> Stream:
        """The stream of one sample of one prompt; `session`: as in `_decode`. Raises InputError."""
        if params.n > 1:
            raise InputError(
                f"stream gives one sample, not n = {params.n}; use generate for several"
            )
        options = prompt_options or PromptOptions()
        samples = self._samples(prompt, params, timestamps=options.timestamps)
        if len(samples) != 1:
            raise InputError(
                f"stream takes one prompt, not {len(samples)}; use generate for several"
            )
        sample = samples[0]
        context = self._context(options.judge, options.scorer)
        meter = Meter(self.tuning, context.costs)
        tokens = self._decode([sample], 1, sources, names, meter, context, session)
        return Stream(pieces(tokens, sample.script if text else None), meter, sample)

    def _decode(
        self,
        samples: list[Sample],
        n: int,
        sources: Sources,
        names: list[str | None],
        meter: Meter,
        context: DecodeContext,
        session: Session | None = None,
    ) -> Iterator[int]:
        """Run the loop over groups of prompts, of at most max_batch rows or else of one prompt, those of equal length
        together; gives each token as it comes. `session`: of the only prompt, which may hold its first tokens and stays
        open.
        """
        sizes = [one.row.prompt.size for one in samples[::n]]
        for places in groups(sizes, max(1, self.facts.max_batch // n)):
            group = [samples[i * n + k].row for i in places for k in range(n)]
            own_sources = None if sources is None else [sources[i] for i in places]
            opened = (
                nullcontext(session)
                if session
                else self._sessions.encoded(own_sources, [names[i] for i in places])
            )
            with opened as own:
                own.select(np.repeat(np.arange(len(group) // n), n))
                for _, token in meter.watch(self._loop.tokens(own, group, context), own, group):
                    yield token
