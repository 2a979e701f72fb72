"""What a server lets through: how much, and from whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Limits:
    """`body`: most bytes of a request; `seconds`: the longest that one may take from its submission; `strict`: fields
    that are not known are refused.
    """

    body: int = 4 << 20
    seconds: float = 600.0
    strict: bool = False

    @property
    def values(self) -> int:
        """The most values of a body, each of which takes far more memory than its bytes."""
        return self.body // 16


@dataclass(frozen=True)
class Access:
    """Who may ask. `key`: what clients must show; None: nothing, and then the `Host` of a request is an
    address, localhost or one of `hosts`. `origins`: of pages elsewhere that a browser lets read the answers.
    `adapters`: folders of adapters that clients with the key may have read.
    """

    key: str | None = None
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    adapters: Sequence[Path] = ()
