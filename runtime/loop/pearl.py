"""PEARL (arXiv:2408.11850): draft model and target model run in parallel, each one step ahead of the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from accel.ir.axis import option
from accel.runtime.inputs.ints import Ints
from accel.runtime.loop._parallel import Ahead, Branch, Parallel
from accel.runtime.speculation.follow import Follower


@dataclass(frozen=True)
class Pearl(Parallel):
    """While a call verifies a draft, the draft model drafts `ahead` tokens that would follow. If the draft
    is fully accepted and the
    next token is the first of these, the next call verifies the others; otherwise they are rejected, and the
    next call verifies none. The output is that of plain decoding, also when sampling.
    """

    ahead: int = option(4, least=1, most=256)

    def drafted(
        self, follower: Follower, texts: Mapping[int, Ints], sure: Mapping[int, int]
    ) -> Mapping[int, Ahead]:
        """See Parallel."""
        most = {i: follower.most(text.size, self.ahead) for i, text in texts.items()}
        found: dict[int, list[int]] = {i: [] for i in texts}
        logits = follower.follow(texts, sure)
        while True:
            new = {i: int(logits[i, 0].argmax()) for i in texts if len(found[i]) < most[i]}
            for i, token in new.items():
                found[i].append(token)
            new = {i: token for i, token in new.items() if len(found[i]) < most[i]}
            if not new:
                return {
                    i: {first: Branch(np.array(rest, np.int64))}
                    for i, (first, *rest) in found.items()
                }
            logits = follower.run({i: np.array([token]) for i, token in new.items()})
