"""The progress bar of a terminal goes on while something silences sys.stderr, as a capture does."""

import contextlib
import io
import sys
import time

from accel.commands.console import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_goes_on_while_stderr_is_silenced(monkeypatch):
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    with progress("build") as tell, contextlib.redirect_stderr(io.StringIO()):
        before = len(shown.getvalue())
        tell("capture", 0.1)
        time.sleep(0.3)
        assert "build: capture" in shown.getvalue()[before:]
