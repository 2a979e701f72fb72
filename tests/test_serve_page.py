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

import accel
from accel.serve.limits import Access
from accel.serve.loading import Models
from accel.serve.models import source

from . import serve_case, serve_tools_case, test_embeddings

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

    def open(self, url, lanes=1):
        self.call("Page.navigate", url=url)
        self.until(f'typeof lanes == "object" && lanes.length == {lanes}')

    def say(self, text):
        """Send it from the form, and wait for the answers."""
        self.js(f'$("text").value = {json.dumps(text)}; $("form").requestSubmit()')
        self.until("!running")

    def texts(self, selector):
        return self.js(
            f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)"
        )

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


def test_reasoning_is_folded_and_calls_are_shown(browser, tmp_path):
    """What calls give is typed, goes back with them, and a call that was cut does not."""
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    arguments = '{"city": "Oslo", "days": 1}'
    with serve_tools_case.serving(tmp_path) as server:
        browser.open(server.url, 2)
        browser.js(
            "lanes[1].select.value = ''; lanes[1].select.onchange(); $('temperature').value = 0"
        )
        browser.js(f"$('tools').value = {json.dumps(json.dumps(serve_tools_case.TOOLS))}")
        serve_tools_case.script(
            server,
            "<think>",
            "I <b>look</b>.",
            "</think>",
            "See:",
            call % ("weather", arguments),
            call % ("now", "{}"),
        )
        browser.say("Weather?")
        assert browser.texts(".thought div") == ["I <b>look</b>."] and not browser.js(
            "document.querySelector('details').open"
        )
        assert browser.texts(".thought summary")[0].startswith("thought for")
        assert browser.texts(".assistant .text") == ["See:"]
        assert browser.texts(".call b") == ["weather", "now"]
        assert browser.texts(".call code") == ['{\n  "city": "Oslo",\n  "days": 1\n}', "{}"]

        serve_tools_case.script(server, "It rains.")
        for i, given in enumerate(("rain", "noon")):
            field = f"document.querySelectorAll('.call input')[{i}]"
            browser.js(
                f"{field}.value = '{given}'; {field}.dispatchEvent(new KeyboardEvent('keydown', {{key: 'Enter'}}))"
            )
        browser.until("!running && lanes[0].messages.length == 5")
        assert browser.texts(".assistant .text") == ["See:", "It rains."]
        prompt = server.models[0].tokenizer.decode(server.engine.prompt)
        assert prompt.endswith(f"{call % ('now', '{}')}tool: raintool: noonassistant:")
        assert call % ("weather", arguments) in prompt

        serve_tools_case.script(server, call % ("weather", arguments))
        browser.js(f"$('tokens').value = {len(server.engine.script) - 12}")
        browser.say("Again?")
        last = "lanes[0].messages.at(-1)"
        assert "tool_calls" not in browser.js(last) and browser.js("lanes[0].open.length") == 0
        assert "cut at the limit" in browser.texts(".count")[0]
        browser.js("$('tools').value = '[{'")
        browser.say("And now?")
        assert browser.texts(".wrong")[0].startswith("tools: ")
        assert browser.complaints == []


def test_models_that_are_not_loaded_and_models_of_vectors(browser, tmp_path):
    text = serve_case.build(tmp_path / "text", max_context=64, max_batch=2)
    test_embeddings.write(tmp_path / "encoder")
    vectors = tmp_path / "vectors"
    accel.optimize(tmp_path / "encoder", out=vectors, max_batch=2, verify=False).close()
    paths, said = (
        (text, vectors),
        "document.querySelector('.chips').textContent.includes('not loaded')",
    )
    with (
        Models([source(path, threads=1) for path in paths]) as models,
        serve_case.over(models) as server,
    ):
        browser.open(server.url)
        assert browser.js("models.map((one) => one.id)") == [text.name]
        assert browser.js(said) and browser.texts("#status") == ["1 model · not loaded yet"]
        browser.js("$('tokens').value = 4")
        browser.say("hello")
        assert browser.js("lanes[0].messages.length") == 2
        browser.until(f"!{said}")
        assert "share" in browser.texts("#status")[0] or "turn" in browser.texts("#status")[0]
    with Models([source(vectors, threads=1)]) as models, serve_case.over(models) as server:
        browser.open(server.url, 0)
        browser.until("$('status').textContent.includes('no model here makes texts')")
        assert browser.js("$('send').disabled") and browser.complaints == []
