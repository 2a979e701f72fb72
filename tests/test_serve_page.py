"""The page of `accel-compile serve` in a headless Chromium, driven over its debugging pipe."""

import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from accel.serve.limits import Access

from . import serve_case

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [pytest.mark.long, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]
_START = "import os, sys; _, a, b, *run = sys.argv; os.dup2(int(a), 3); os.dup2(int(b), 4); os.execv(run[0], run)"


class Browser:
    """One page. Messages of the protocol are JSON, each with a zero byte behind it; its ends are files 3 and 4."""

    def __init__(self, profile):
        (theirs, self._write), (self._read, answers) = os.pipe(), os.pipe()
        theirs, answers = (fcntl.fcntl(f, fcntl.F_DUPFD, 20) for f in (theirs, answers))
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs), str(answers), CHROMIUM, *flags,
             "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs, answers), stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for file in (theirs, answers):
            os.close(file)
        self._numbers, self._rest, self._session = itertools.count(1), b"", None
        self.complaints = []
        found = self.call("Target.getTargets")["targetInfos"]
        (page,) = [one for one in found if one["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                self._rest += os.read(self._read, 1 << 16) or pytest.fail("the browser ended")
            one, _, self._rest = self._rest.partition(b"\0")
            told = json.loads(one)
            if told.get("id") == number:
                assert "error" not in told, told
                return told["result"]
            if told.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(told["params"])

    def js(self, code):
        told = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def until(self, code):
        end = time.monotonic() + 60
        while not self.js(code):
            assert time.monotonic() < end, code
            time.sleep(0.1)

    def close(self):
        self.call("Browser.close")
        self._process.wait(30)
        os.close(self._write)
        os.close(self._read)


@pytest.fixture
def browser(tmp_path):
    found = Browser(tmp_path / "profile")
    yield found
    found.close()


def test_the_page_chats_with_two_recipes(browser, tmp_path):
    """Side by side: what each says is what `generate` gives, drafts are counted, and a text is never markup."""
    plain = serve_case.build(tmp_path / "a", max_context=512, max_batch=2)
    drafts = serve_case.build(tmp_path / "b", "prompt-lookup", max_context=512, max_batch=2)
    drafts = drafts.rename(drafts.with_name("drafts"))
    with serve_case.running([plain, drafts], access=Access("k")) as server:
        browser.call("Page.navigate", url=server.url)
        browser.until('typeof $ == "function" && !$("keyed").hidden')
        told = [one for one in browser.complaints if "401" not in str(one)]
        browser.js('$("key").value = "k"; start()')
        browser.until("document.querySelectorAll('.lane').length == 2")
        text = "x = [1, 2, 3]\n" * 6 + "<b>hi</b>"
        browser.js(f'$("text").value = {json.dumps(text)}; $("temperature").value = 0')
        browser.js('$("tokens").value = 160; $("form").requestSubmit()')
        browser.until("!running")
        talk = [{"role": "user", "content": text}]
        want = [one.generate(talk, 160).text[0] for one in server.models]
        shown = "[...document.querySelectorAll('.{}')].map((one) => one.textContent)"
        assert browser.js(shown.format("assistant")) == want
        assert browser.js(shown.format("user")) == [text, text]
        assert browser.js("document.querySelectorAll('.talk b').length") == 0
        assert all("tokens/s" in one for one in browser.js(shown.format("speed")))
        assert all(one.startswith("160") for one in browser.js(shown.format("count")))
        first, second = browser.js(shown.format("drafts"))
        stats = server.engines[1].stats
        assert first.startswith("none") and stats["drafted_total"] > 0
        assert second.startswith(f"{stats['accepted_total']:.0f} of {stats['drafted_total']:.0f}")
        assert all("plain cache" in one for one in browser.js(shown.format("state")))
        browser.js('$("tokens").value = 400; $("text").value = "go on"; $("form").requestSubmit()')
        browser.until("document.querySelectorAll('.assistant.going').length")
        browser.js('$("stop").click()')
        browser.until("!running")
        browser.js('$("text").value = "go on"; $("form").requestSubmit()')
        browser.until("document.querySelectorAll('.assistant.going').length")
        browser.js('$("fresh").click()')
        browser.until("!running")
        assert browser.js("lanes.every((one) => one.messages.length == 0)")
        assert server.idle()
        assert [one for one in browser.complaints if "401" not in str(one)] == told == []
