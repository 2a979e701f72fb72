"""What a request does to the logits before they are sampled from: biases, the user's functions, a grammar."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np

from accel.ir.errors import InputError
from accel.ir.suppressed import Suppressed
from accel.runtime.call import Logits
from accel.runtime.decode.row import tokens_of
from accel.runtime.decode.structured_outputs import Guide
from accel.runtime.decode.timestamps import Timestamps
from accel.runtime.inputs.ints import Ints, as_ints, check_vocabulary
from accel.runtime.sample import Distribution, Sampler, numbers

LogitsProcessor = Callable[[Ints, Logits], Any]  # (token ids [n], logits float32 [V]) -> logits [V]


class Processed(Sampler):
    """A sampler over changed logits, as in vLLM: first the tokens that the model rules out, and where
    times of speech may stand, then `logit_bias`, then
    `logits_processors` in their order, then the grammar, then all that the sampler does itself.

    So the distribution of a token depends on the tokens before it alone, drafted ones too, and every rule that
    verifies drafts stays as exact as it is. A draft model with fewer tokens lacks the others.
    """

    def __init__(
        self,
        sampler: Sampler,
        vocab_size: int,
        bias: Mapping[int, float] | None = None,
        processors: Sequence[LogitsProcessor] = (),
        guide: Guide | None = None,
        suppressed: Suppressed | None = None,
        start: int | None = None,
        times: Timestamps | None = None,
    ):
        """`guide`: of one row. `start`: the tokens before the first new one; None: no token is known to be the first.
        Raises InputError for a bias outside the vocabulary.
        """
        self._sampler = sampler
        self._size = vocab_size
        self._biased = as_ints(list(bias or ()), "logit_bias")
        check_vocabulary(self._biased, vocab_size, "logit_bias")
        self._bias = np.array(list((bias or {}).values()), np.float32)
        self._processors = tuple(processors)
        self._guide = guide
        ruled = suppressed or Suppressed()
        self._always = np.array(ruled.always, np.int64)
        self._first = np.array(ruled.first, np.int64)
        self._start = start
        self._times = times

    @property
    def greedy(self) -> bool:
        return self._sampler.greedy

    def complete(self, seen: Ints) -> bool:
        return self._guide is not None and self._guide.complete(seen)

    def branch(self) -> Processed:
        if self._guide is None:
            return self
        other = copy(self)
        other._guide = self._guide.branch()
        return other

    def scores(self, logits: Logits, seen: Ints) -> Logits:
        return self._sampler.scores(self._changed(logits, seen), seen)

    def distribution(self, logits: Logits, seen: Ints) -> Distribution:
        law = self._sampler.distribution(self._changed(logits, seen), seen)
        if not law.random or (law.weights > 0).all():
            return law
        keep = np.flatnonzero(law.weights)
        return Distribution(law.tokens[keep], law.weights[keep])

    def _changed(self, logits: Logits, seen: Ints) -> Logits:
        """The logits [n] that the sampler goes by; n is less than V for a draft model with fewer tokens."""
        whole = np.full(self._size, -np.inf, np.float32)
        whole[: logits.size] = numbers(logits)
        whole[self._always] = -np.inf
        if seen.size == self._start:
            whole[self._first] = -np.inf
        if self._times is not None:
            self._times.restrict(whole, seen)
        whole[self._biased] += self._bias
        for i, processor in enumerate(self._processors):
            whole = self._called(i, processor, whole, seen)
        if self._guide is not None:
            self._guide.restrict(whole, seen)
        if math.isfinite(whole[: logits.size].max()):
            return whole[: logits.size]
        if logits.size < self._size:  # no token that the draft model has: any draft falls
            return logits
        raise InputError(
            "no token may follow: logit_bias, logits_processors, structured_outputs and the tokens that the model's "
            "generation configuration suppresses together leave none; allow more tokens"
        )

    def _called(self, i: int, processor: LogitsProcessor, logits: Logits, seen: Ints) -> Logits:
        """What the user's function makes of logits that it may write into."""
        name = (
            f"logits_processors[{i}] ({getattr(processor, '__name__', type(processor).__name__)})"
        )
        ids = tokens_of(seen, self._size).view()
        ids.flags.writeable = False
        try:
            found: Any = processor(ids, logits)
            values = np.asarray(found, np.float32)
        except Exception as error:
            raise InputError(
                f"{name} raised {type(error).__name__}: {error}; it is called with token ids [n] and logits float32 "
                f"[{self._size}], and returns the logits"
            ) from error
        if values.shape != (self._size,):
            raise InputError(
                f"{name} returned {type(found).__name__} of shape {list(values.shape)}; return the logits, float32 "
                f"[{self._size}]"
            )
        if not math.isfinite(top := values.max()):
            wrong = "NaN" if math.isnan(top) else "-inf for every token" if top < 0 else "+inf"
            raise InputError(
                f"{name} returned {wrong}; return numbers, and -inf for tokens that may not come"
            )
        return values
