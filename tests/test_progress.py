"""The progress bar of a terminal goes on while something silences sys.stderr, as a capture does."""

import contextlib
import io
import sys
import time

from accel.commands.console import progress, waited


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


def slow(seconds, *pieces):
    time.sleep(seconds)
    yield from pieces


def test_a_terminal_shows_that_the_first_piece_is_waited_for(monkeypatch):
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr("accel.commands.console.PATIENCE", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    assert list(waited(slow(0, "a"))) == ["a"]  # a short wait may be shown, or not
    before = len(shown.getvalue())
    assert list(waited(slow(0.3, "a", "b"))) == ["a", "b"]
    assert "computing the first token" in shown.getvalue()[before:]


def test_a_file_shows_no_waiting(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr("accel.commands.console.PATIENCE", 0.01)
    assert list(waited(slow(0.1, "a"))) == ["a"] and not shown.getvalue()
