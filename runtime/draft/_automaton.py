"""The suffix automaton of a text that grows: where its substrings first ended."""

from __future__ import annotations

ROOT = 0  # the state of the empty string


class Automaton:
    """States [at most 2n], each of the substrings of n tokens that end at the same places: the longest one's length,
    the transitions by a next token, the link to the state of the longest suffix that also ends elsewhere, and the first
    of the places. It takes amortised constant time per token.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.after: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.first = [-1]  # the index of the last token of the first occurrence
        self._last = ROOT  # the state of all of the text

    def append(self, token: int) -> None:
        """Take one more token."""
        new = self._state(len(self.text) + 1, len(self.text), {})
        last, self._last = self._last, new
        self.text.append(token)
        while last >= 0 and token not in self.after[last]:
            self.after[last][token] = new
            last = self.link[last]
        if last < 0:
            self.link[new] = ROOT
            return
        found = self.after[last][token]
        if self.length[found] == self.length[last] + 1:
            self.link[new] = found
            return
        clone = self._state(self.length[last] + 1, self.first[found], dict(self.after[found]))
        self.link[clone] = self.link[found]
        self.link[found] = self.link[new] = clone
        while last >= 0 and self.after[last].get(token) == found:
            self.after[last][token] = clone
            last = self.link[last]

    def follow(self, state: int, size: int, token: int) -> tuple[int, int]:
        """The state and the size of the longest match after a token, of a match of `size` tokens in `state` before."""
        while state >= 0 and token not in self.after[state]:
            state = self.link[state]
            size = self.length[state] if state >= 0 else 0
        return (self.after[state][token], size + 1) if state >= 0 else (ROOT, 0)

    def _state(self, length: int, first: int, after: dict[int, int]) -> int:
        self.after.append(after)
        self.link.append(ROOT)
        self.length.append(length)
        self.first.append(first)
        return len(self.length) - 1
