"""The result of generation: tokens, text and statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accel.runtime.decode.logprobs import Logprob
from accel.runtime.model.notebook import table


@dataclass(frozen=True)
class Output:
    """The result of `generate`.

    Attributes:
        tokens: the new token ids of each prompt.
        text: the new text of each prompt, with the space before its first word, if there is one; None without a
            tokenizer.
        stats: a dict of statistics:

            - `calls`: graph calls; `tokens`: new tokens; `tokens_per_call`; `prompt_tokens`;
            - `reused`: prompt tokens that a prefix cache provided;
            - `exchanged_bytes`: what ranks that shared the prompts sent each other (`prefill.ranks`);
            - `prefill_seconds`, `decode_seconds`; `tokens_per_second`: in decoding, without the first
              token of each group;
            - `kv_bytes`: state of the largest group, in bytes, with that of sessions that draft;
              `peak_memory`: of the process, in bytes;
            - `snapshots`: of recurrent state, how many were `taken`, in how many `seconds`, and the `bytes` of those
              that the largest group holds; None if the model has none;
            - `kernels`: the kernel variant; `costs`: cost of a call of T tokens relative to one
              token, None if not measured on this machine;
            - `speculation`: None if the loop does not draft; else `drafted` and `accepted` tokens,
              `rounds` (rows with a draft), `fallback` (plain steps because drafting was slower),
              `by_place` (tested and accepted tokens by position in the draft), and `seconds` of
              `draft`, `verify` and `host`;
            - `finish`: why each row ended: `eos`, `stop`, `length` or `context`.
        finish_reason: why each text ended, in vLLM's words: "stop" (an end token, a stop string, the end of a
            grammar) or "length" (`max_tokens`, or the context is full).
        stop_reason: the stop string or the one of `stop_token_ids` that ended it; None for all other ends.
        logprobs: for each token of each text a dict of token id -> `Logprob`, the token itself first; None if they
            were not requested.

    With `n` samples per prompt all lists are flat: those of prompt i are at i * n to i * n + n - 1.
    """

    tokens: list[list[int]]
    text: list[str] | None
    stats: dict[str, Any]
    finish_reason: list[str]
    stop_reason: list[int | str | None]
    logprobs: list[list[dict[int, Logprob]]] | None = None

    def _repr_html_(self) -> str:
        shown: Sequence[Any] = self.tokens if self.text is None else self.text
        rows = zip(range(len(shown)), shown, map(len, self.tokens), self.finish_reason, strict=True)
        speed = f"{self.stats['tokens']} tokens, {self.stats['tokens_per_second']:.0f} tokens/s"
        name = "tokens" if self.text is None else "text"
        return table(speed, ["", name, "new tokens", "finish_reason"], rows)
