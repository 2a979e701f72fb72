"""What drafts would have been of tokens that come without them, which takes no call of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.sample.standard import Standard
from accel.runtime.tree import NONE, ROOT, Tree

LOOK = 3  # levels of a draft that say enough of it
END, BEFORE = (
    16,
    512,
)  # tokens at the end of a prompt that drafts are held against, and those before

Drafted = tuple[int, int, int]  # levels of a draft, how many of them stand, its tokens


def stood(tree: Tree, after: Ints, most: int | None = None) -> int | None:
    """How many levels of a draft stand where the tokens `after` [n] came, of the first `most`; None: more are to come
    before that is known.
    """
    node, count = ROOT, 0
    while below := tree.children(node) if most is None or count < most else ():
        if count == after.size:
            return None
        found = [child for child in below if tree.tokens[child] == after[count]]
        if not found:
            return count
        node, count = found[0], count + 1
    return count


class Watch:
    """Drafts of all rows of a group at one place, until it is known what became of them."""

    def __init__(self) -> None:
        self._trees: dict[int, tuple[Tree, int]] = {}  # of rows, and the place of its first token
        self._rows: list[int] = []  # those that were asked

    @property
    def open(self) -> bool:
        """Whether there are drafts of which more is to come."""
        return bool(self._trees)

    def put(self, trees: Mapping[int, Tree], rows: Sequence[Row], asked: Sequence[int]) -> None:
        """These rows drafted, behind the tokens that they have."""
        self._trees = {i: (tree, rows[i].seen.size) for i, tree in trees.items() if len(tree)}
        self._rows = list(asked)

    def drop(self) -> None:
        """Other rows are there now."""
        self._trees = {}

    def outcomes(self, rows: Sequence[Row], padded: bool) -> list[Drafted]:
        """What became of them, once that is known of all; nothing before. `padded`: a call computes as much for a row
        without a draft, or with a short one, as for the longest.
        """
        known = dict[int, Drafted]()
        for i, (tree, start) in self._trees.items():
            count = stood(tree, rows[i].seen[start:], LOOK)
            if count is None and not rows[i].finish:
                return []
            known[i] = _told(tree, count or 0, cut=count == LOOK)
        self._trees = {}
        return _padded(known, self._rows) if padded else list(known.values())


def _told(tree: Tree, count: int, cut: bool) -> Drafted:
    """Of a draft of which so many levels stand. `cut`: one looked no further."""
    levels = len(tree) if tree.branch is None else int(tree.depths.max())
    return (count if cut else levels), count, len(tree)


def _padded(known: Mapping[int, Drafted], rows: Sequence[int]) -> list[Drafted]:
    """Of each row as if its draft was as long as the longest, of which nothing more stands."""
    if not known:
        return []
    levels, _, size = map(max, zip(*known.values(), strict=True))
    none = levels, 0, size
    return [(levels, known.get(i, none)[1], size) for i in rows]


def foretold(
    drafting: Callable[[Sequence[Row]], Callable[[Mapping[int, int]], Mapping[int, Tree]]],
    prompts: Sequence[Ints],
    limit: int,
    padded: bool,
    goes_on: Callable[[], bool],
) -> Iterator[list[Drafted]]:
    """Of the last tokens of prompts, what drafts would have been of them, a place of each at a time, for as long as
    there is time (`goes_on`). `drafting`: opens drafters of rows, and gives what drafts for them at most so many
    tokens. `padded`: as of `Watch.outcomes`.
    """
    ends = [min(END, prompt.size // 2) for prompt in prompts]
    heads = [
        Row(
            prompt[max(0, prompt.size - end - BEFORE) : prompt.size - end], Standard(), np.random.default_rng(0),
            limit=end, max_context=prompt.size,
        )
        for prompt, end in zip(prompts, ends, strict=True)
    ]  # fmt: skip
    draft = drafting(heads)
    while (going := [i for i, head in enumerate(heads) if not head.finish]) and goes_on():
        trees = draft(dict.fromkeys(going, limit))
        known = dict[int, Drafted]()
        for i in going:
            tree, head = trees.get(i, NONE), heads[i]
            rest = prompts[i][prompts[i].size - head.left :]
            count = stood(tree, rest)
            if len(tree) and count is not None:
                known[i] = _told(tree, count, cut=False)
            for token in rest[: (rest.size if count is None else count) + 1].tolist():
                head.accept(token, None)
        yield _padded(known, going) if padded else list(known.values())
