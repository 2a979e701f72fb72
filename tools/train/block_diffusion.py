"""Train the bundled block-diffusion model from the bundled one's weights, restartably.

    python tools/train/block_diffusion.py --out RUN --minutes 25       # train, or continue with --resume
    python tools/train/block_diffusion.py --out RUN --export           # RUN -> api/reference/blocks

The model stays causal, and learns to see both ways within a block: masks behind the text, or behind a first token of
the block (Set Block Decoding, arXiv:2509.04185; NBDiff, arXiv:2512.06776). One call has the text, causal, and behind
it a stretch of it in blocks, of which a share is masked: a block sees the text before it and itself. The loss is the
sum of the text's next tokens' and of those that are masked; the logits of token i predict token i + 1 in both, and
those of a block's last token what follows the block. Minutes are of the processors. SIGTERM saves the run.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from diffusion import CODE, MASK, MIX, Masked, Run, main
from losses import head_loss
from torch import Tensor

BLOCKS = (4, 8, 16)  # that decoding may go by
LENGTHS = {96: 48, 160: 64, 288: 96}  # tokens of a row: of which so many stand in blocks, too
OFTEN = (0.4, 0.4, 0.2)  # rows of each length
TOKENS = 4608  # of a step, those in blocks too
END = 0.1  # what one of many end marks counts
ALL = 0.5  # how often all that a block lacks is masked
HEADS = 0.5  # how often the first tokens of blocks may be masked, too


class InBlocks(Masked):
    """Batches `(ids [B,T], given [B,M], start [B], size [], clean [B,T], masked [B,M])`: the text; its stretch of M
    tokens from `start` on as the model is shown it, in blocks of `size`; how much counts what each token of the text
    predicts, and of the stretch.
    """

    def draw(self, step: int) -> tuple[Tensor, ...]:
        self.rng.seed(f"{self.seed} {step}")
        length = self.rng.choices(list(LENGTHS), OFTEN)[0]
        block, stretch = self.rng.choice(BLOCKS), LENGTHS[length]
        count = TOKENS // (length + stretch)
        kinds = self.rng.choices(list(MIX), list(MIX.values()), k=count)
        drawn = [self._in_blocks(kind, length, stretch, block) for kind in kinds]
        ids, given, start, clean, masked = (
            torch.tensor(np.stack(part)) for part in zip(*drawn, strict=True)
        )
        return ids, given, start, torch.tensor(block), clean, masked

    def _in_blocks(self, kind: str, length: int, stretch: int, block: int) -> tuple[Any, ...]:
        row, start, end = self.row(kind, length)
        worth = np.where(np.arange(length) < start, 0.0, np.where(np.arange(length) < end, 1, END))
        worth *= CODE if kind == "code" else 1.0
        latest = max(start - 1, min(length - 1 - stretch, end - 1))
        first = min(start - 1 + self.rng.randrange(1 + latest - (start - 1)), length - 1 - stretch)
        if kind != "code" and self.rng.random() < 0.5:  # as a prompt's end meets it
            first = min(start - 1 + self.rng.randrange(2), length - 1 - stretch)
        share = 1.0 if self.rng.random() < ALL else 1 - self.rng.random() * 0.8
        places = first + np.arange(stretch)
        heads = np.arange(stretch) % block == 0
        hidden = (places >= start) & np.array([self.rng.random() < share for _ in places])
        hidden &= ~heads | (self.rng.random() < HEADS)
        given = np.where(hidden, MASK, row[places])
        unseen = np.append(hidden[1:] | heads[1:], True)  # whether the next token is unknown there
        after = worth[1:]
        masked = np.where(unseen, after[places], 0.0)
        clean = np.append(after, 0.0)
        return row, given, np.int64(first), clean.astype(np.float32), masked.astype(np.float32)


class BlockRun(Run):
    """A run that learns from a text and from its blocks at once."""

    told = __doc__
    default = "blocks"
    made_of: ClassVar[type[Masked]] = InBlocks
    fills: ClassVar[dict[str, Any]] = {
        "mask_token_id": MASK,
        "logit_shift": True,
        "block_size": max(BLOCKS),
    }

    def loss(
        self, ids: Tensor, given: Tensor, start: Tensor, size: Tensor, *weights: Tensor
    ) -> Tensor:
        stretch = start[:, None] + torch.arange(given.shape[1], device=self.device)
        state = self.states(ids, given, start, int(size))
        after = torch.cat([ids[:, 1:], ids[:, :1]], 1)
        targets = torch.cat([after, after.gather(1, stretch)], 1).flatten()
        counts = torch.cat([part / part.sum().clamp(min=1e-6) for part in weights], 1).flatten()
        at = counts.nonzero().squeeze(1)
        normed = self.model.norm(state.flatten(0, 1)[at])
        return head_loss(normed, self.model.embed_tokens.weight, targets[at], counts[at])[0]

    def states(self, ids: Tensor, given: Tensor, start: Tensor, size: int) -> Tensor:
        """The last states [B,T+M,E] of the text and of the stretch in blocks."""
        length, stretch = ids.shape[1], given.shape[1]
        text = torch.arange(length, device=self.device)
        blocks = torch.arange(stretch, device=self.device)
        begins = start[:, None] + blocks // size * size
        sees = torch.zeros(len(ids), length + stretch, length + stretch, dtype=torch.bool)
        sees = sees.to(self.device)
        sees[:, :length, :length] = text <= text[:, None]
        sees[:, length:, :length] = text < begins[:, :, None]
        sees[:, length:, length:] = blocks // size == (blocks // size)[:, None]
        places = torch.cat([text.expand(len(ids), -1), start[:, None] + blocks], 1)
        shown = torch.cat([ids, given], 1)
        *_, state = self.model.states(shown, places=places, sees=sees[:, None])
        return state

    def guess(self, row: np.ndarray, start: int) -> np.ndarray:
        """Of the first block, behind a prompt's last token."""
        size = max(BLOCKS)
        given = np.full(size, MASK)
        given[0] = row[start - 1]
        parts = (torch.tensor(part[None]).to(self.device) for part in (row, given))
        state = self.states(*parts, torch.tensor([start - 1]).to(self.device), size)
        found: np.ndarray = self.model.head(state[0, len(row) :]).argmax(-1).cpu().numpy()
        return found


if __name__ == "__main__":
    main(BlockRun)
