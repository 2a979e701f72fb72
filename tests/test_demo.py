"""The demo's own check of the tokens that it shows."""

import pytest

import accel
from accel.commands import demo


def test_demo_refuses_tokens_that_differ(monkeypatch):
    """The check of the demo itself: equal tokens pass, a tie passes, anything else does not."""
    plain = demo._Plain(None, [[1, 2, 3]])
    monkeypatch.setattr(demo, "PROMPTS", ("x",))
    monkeypatch.setattr(demo, "_gap", lambda model, prefix: {2: 1.0, 3: 1e-6}[len(prefix)])
    demo._check(plain, [[9]], [[1, 2, 3]])
    demo._check(plain, [[9]], [[1, 2, 4]])
    with pytest.raises(accel.AccelError, match="token 1 after 'x'"):
        demo._check(plain, [[9]], [[1, 4, 3]])
