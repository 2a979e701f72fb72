"""Trained heads that draft by what their target computes: what a session of one takes and gives beside tokens."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.fields import Positive

FUSE = "fuse"  # the entry that makes features of taps
TAPS = "taps"  # its input [B,T,F]
FEATURES = "features"  # its output [B,T,W]
TAP_ROWS = "tap_rows.weight"  # the table that stands in for taps in a head's module

MARKOV = "markov"  # the entry that says what the token before changes in a block
HIDDEN, STATE = "hidden", "state"  # its inputs [B,T,H] and [B,T,S]
CANDIDATES = "candidates"  # its input [B,T,K]
BIAS, CONFIDENCE, NEXT_STATE = "bias", "confidence", "next_state"  # its outputs [B,T,V|K|1|S]
HIDDEN_ROWS, STATE_ROWS = "hidden_rows.weight", "state_rows.weight"  # as `TAP_ROWS`, for them
CANDIDATE_ROWS = "candidate_rows"


@dataclass(frozen=True)
class DraftHead:
    """Slot t of a head's session holds token t + 1 and the features of token t, and its logits are of token t + 2.

    drafter: the method that drafts with it. taps: the outputs of the target's step (`accel.ir.taps`) which, side by
    side, the entry `fuse` makes a token's features of; they are the features as they are where nothing is `fused`.
    width: how many features a token has; a call gives them (`embeds`), and a step gives those of the next token behind
    its logits. embedding: how many numbers of the target's embedding of the token a call gives before them; 0: the head
    has its own. tap_width: numbers of all taps.

    block: tokens of a block, the last of the text and masks (the token `mask`), which one call drafts; 0: none. Slot t
    of such a head holds the features of token t, and nothing lies behind logits. The last feature is 1; a block's token
    has no other, and its is less by 1 than that of the one before it in the block, the first's 0. causal:
    the layers where a token of a block sees those before it alone; in others all of a block see each other. anchored: a
    block's tokens say each the next one, the first too; else each mask says its own. markov: what they say changes by
    the token before, which the entry `markov` reads, one of a block after the other. hidden: numbers behind the logits
    of a block's token, which are read with the next one: by `markov`, or else by the next block. state: numbers that
    `markov` hands from one to the next. confident: it says how sure a token is. candidates: how many tokens, the
    likeliest of a place, may come there; `markov` is given them, and says what is added to theirs alone; 0: all may.

    parallel: how many tokens one call drafts, the first from the features of the last token, the others in slots behind
    it that hold the token `mask`; 0: not so.

    reads: how many of a token's features, the last ones, are keys and values of the target, in whose attention the head
    looks. They are 0 for a token that the target did not run, which nothing sees there, and do not lie behind logits.

    independent: how many tokens are drafted from the features of one, each by logits of its own and whatever the others
    become; 0: not so. Behind the logits of token t + 2 lie those of t + 3 and so on, and no features. Such a head
    reads features alone, and no slot but its own.

    cascade: how many modules it has, of which each says one token more and has a cache of its own; 0: not so. A call
    runs one of them (`run_layers`), by the states of the module before, which it gives as `final`; nothing lies behind
    logits. Slot t of module m holds token t + m + 1.
    """

    drafter: str
    taps: tuple[str, ...]
    width: Positive
    tap_width: Positive
    embedding: int = 0
    fused: bool = True
    block: int = 0
    mask: int = 0
    causal: tuple[int, ...] = ()
    anchored: bool = False
    markov: bool = False
    hidden: int = 0
    state: int = 0
    confident: bool = False
    candidates: int = 0
    parallel: int = 0
    independent: int = 0
    reads: int = 0
    cascade: int = 0

    def behind(self, vocab_size: int) -> int:
        """How many numbers a step gives behind a token's logits."""
        if self.independent:
            return vocab_size * (self.independent - 1)
        if self.cascade:
            return 0
        return self.hidden if self.block else self.width - self.reads

    def vocabulary_of(self, width: int) -> int:
        """How many tokens the head drafts where a step gives so many numbers."""
        if self.independent:
            return width // self.independent
        return width - self.behind(width)
