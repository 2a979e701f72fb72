"""Chat templates: rendered as transformers renders them, kept in the artifact, and stopped where they are hostile.

The templates are written here in the styles of model families: their forms, not their words.
"""

import json
import shutil
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import models
import pytest
from transformers import PreTrainedTokenizerFast

import accel
from accel.commands import demo
from accel.compiler.load.tokenizer import read_tokenizer, write_tokenizer
from accel.ir.errors import ArtifactError, CaptureError, InputError
from accel.runtime.artifact.artifact import bind, write_manifest
from accel.runtime.inputs import chat
from accel.runtime.inputs.tokenizer_config import TokenizerConfig

CHATML = """{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{% endif %}"""
LLAMA = """{{- bos_token }}
{%- if not day is defined %}{%- set day = "1 May" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set first = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set first = "" %}
{%- endif %}
{{- "<head>system</head>\\n\\nToday: " + day + "\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n" }}{%- endfor %}
{%- endif %}
{{- first + "<end>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls|length != 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<head>assistant</head>{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}<end>" }}
    {%- elif message.role in ("tool", "ipython") %}
        {{- "<head>ipython</head>" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- "<end>" }}
    {%- else %}
        {{- '<head>' + message['role'] + '</head>\\n\\n' + message['content'] | trim + '<end>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<head>assistant</head>\\n\\n' }}{%- endif %}
"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "Functions in <tools></tools>:\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, seen=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.seen and message.role == "user" and not message.content.startswith('<reply>') %}
        {%- set ns.seen = true %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content if message.content is string else '' %}
        {%- if '</think>' in content and loop.index0 <= ns.last %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {%- set given = call.arguments | tojson(sort_keys=true) %}
            {{- '\\n<call>{"name": "' ~ call.name ~ '", "arguments": ' ~ given ~ '}</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<reply>' + message.content + '</reply>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest | selectattr("role", "in", ["user", "assistant"]) | list %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("users and assistants take turns, and the user begins") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system is defined %}{{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- else %}{{- " " + message["content"]|trim + eos_token }}{%- endif %}
{%- endfor %}
"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<turn>' + role + '\\n' + message['content'] | trim + '</turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}"""
TRAINED = """{% macro turn(role) %}[{{ role | upper }}]{{ caller() }}{% endmacro %}
{%- for message in messages -%}
{%- if message.role == 'skip' %}{% continue %}{% endif -%}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{%- else %}
    {%- call turn(message.role) %}{{ message.content | default('-') | replace('\\n', ' ') }}{% endcall %}
{%- endif %}
    {{- "{:>4}|%s" | format("x") }}{{ "%03d" % loop.index }} {{ loop.cycle('a', 'b') }}
{%- if message.role == 'end' %}{% break %}{% endif -%}
{%- endfor -%}
{{ documents | tojson if documents }} {{ strftime_now("%Y") | length }}
{{ {'é': "<&'"} | tojson(separators=(',', ':')) }}"""
FAMILIES = {
    "chatml": CHATML, "llama": LLAMA, "qwen": QWEN, "mistral": MISTRAL, "gemma": GEMMA, "trained": TRAINED,
}  # fmt: skip


def say(*turns):
    return [{"role": role, "content": content} for role, content in turns]


CALL = {"type": "function", "function": {"name": "add", "arguments": {"b": [2, "é"], "a": 1}}}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds <b> & 'c'", "parameters": {}}}
]  # fmt: skip
CONVERSATIONS = [
    say(("user", "Hello")),
    say(("user", "  white space \n\n")),
    say(("system", "Be brief."), ("user", "1 < 2 & 'x'?"),
        ("assistant", "<think>\nhm</think>\n\nyes "), ("user", "ünï 🎉")),
    say(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "<think>d</think>e")),
    say(("user", "a"), ("user", "b")),
    [*say(("user", "1+2?")), {"role": "assistant", "content": None, "tool_calls": [CALL]},
     *say(("tool", "3"), ("tool", "4"))],
    [*say(("user", "1+2?")), {"role": "assistant", "tool_calls": [CALL, CALL]}],
    say(("skip", "x"), ("user", "y"), ("end", "z"), ("user", "after")),
    [{"role": "user", "content": [{"type": "text", "text": "parts"}]}],
]  # fmt: skip
GIVEN = [
    {},
    {"tools": TOOLS},
    {"add_generation_prompt": False, "enable_thinking": False, "day": "2 May"},
]
TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}


def theirs(template):
    file = str(demo.reference() / "tokenizer.json")
    return PreTrainedTokenizerFast(tokenizer_file=file, chat_template=template, **TOKENS)


def either(render, *arguments, **given):
    """What it gives, or that it refuses."""
    try:
        return render(*arguments, **given)
    except ArtifactError:
        raise
    except Exception:
        return "refused"


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_and_tokens_are_those_of_transformers(family):
    their = theirs(FAMILIES[family])
    mine = read_tokenizer(their)
    texts = set()
    for messages, given in product(CONVERSATIONS, GIVEN):
        asked = {"add_generation_prompt": True, **given}
        bare = [
            {k: v for k, v in m.items() if v is not None} for m in messages
        ]  # later versions do so themselves
        want = either(their.apply_chat_template, bare, tokenize=False, **asked)
        assert either(mine.apply_chat_template, messages, tokenize=False, **given) == want
        texts.add(want)
        if want != "refused":
            ids = their.apply_chat_template(bare, return_dict=False, **asked)
            assert mine.apply_chat_template(messages, **given) == ids
    assert len(texts) >= 6


def test_a_template_that_refuses_says_why():
    mine = read_tokenizer(theirs(GEMMA))
    with pytest.raises(InputError, match="refuses these messages: System role not supported"):
        mine.apply_chat_template(say(("system", "x"), ("user", "y")))
    mine = read_tokenizer(theirs(CHATML))
    with pytest.raises(InputError, match="because message 1 has no content; write"):
        mine.apply_chat_template([*say(("user", "x")), {"role": "user"}])
    with pytest.raises(InputError, match="message 0 has no content, only 'text'; write"):
        mine.apply_chat_template([{"role": "user", "text": "x"}])
    with pytest.raises(InputError, match="cannot render these messages .TypeError"):
        mine.apply_chat_template([{"role": "user", "content": 3}])


def test_the_template_is_chosen_as_transformers_chooses_it():
    named = {
        "default": "D{{ messages|length }}",
        "tool_use": "T{{ tools|length }}",
        "rag": "R{{ documents|length }}",
    }
    their = theirs(named)
    mine = read_tokenizer(their)
    documents = [{"title": "t", "text": "x"}]
    for given in (
        {},
        {"tools": TOOLS},
        {"chat_template": "rag", "documents": documents},
        {"chat_template": "{{ 1 }}"},
    ):
        want = their.apply_chat_template(say(("user", "x")), tokenize=False, **given)
        assert mine.apply_chat_template(say(("user", "x")), tokenize=False, **given) == want
    with pytest.raises(InputError, match="did you mean 'tool_use'"):
        mine.apply_chat_template(say(("user", "x")), chat_template="tool-use")
    only = read_tokenizer(theirs({"rag": "R", "x": "X"}))
    with pytest.raises(InputError, match="give one of rag, x"):
        only.apply_chat_template(say(("user", "x")))


@pytest.mark.parametrize(
    "messages", ["Hello", [], {}, [3], [{"content": "x"}], [{"role": 1, "content": "x"}], None]
)
def test_what_are_no_messages(messages):
    mine = read_tokenizer(theirs(CHATML))
    with pytest.raises(InputError, match='"role": "user"'):
        mine.apply_chat_template(messages)


def test_a_function_is_no_tool():
    with pytest.raises(InputError, match="get_json_schema"):
        read_tokenizer(theirs(QWEN)).apply_chat_template(say(("user", "x")), [print])


# Folders.


def saved(folder, template, jinja):
    theirs(template).save_pretrained(folder, save_jinja_files=jinja)
    return folder


@pytest.mark.parametrize("jinja", [True, False])
@pytest.mark.parametrize("template", [GEMMA, {"default": CHATML, "tool_use": QWEN}])
def test_every_form_of_a_folder_is_read_and_written_again(tmp_path, template, jinja):
    mine = read_tokenizer(saved(tmp_path / "hf", template, jinja))
    named = template if isinstance(template, dict) else {"default": template}
    assert mine.config == TokenizerConfig(TOKENS, named)
    (tmp_path / "made").mkdir()
    write_tokenizer(mine, tmp_path / "made")
    assert TokenizerConfig.read(tmp_path / "made") == mine.config
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path / "made")
    want = mine.apply_chat_template(say(("user", "x")))
    assert (
        again.apply_chat_template(say(("user", "x")), add_generation_prompt=True, return_dict=False)
        == want
    )
    assert again("def f").input_ids == mine.encode("def f")


def test_special_tokens_of_older_folders(tmp_path):
    saved(tmp_path, CHATML, False)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    kept = {k: v for k, v in config.items() if k not in (*TOKENS, "added_tokens_decoder")}
    tokens = {
        "bos_token": {"content": "<|bos|>", "lstrip": False},
        "eos_token": "<|eos|>",
        "unk_token": None,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(kept))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    found = read_tokenizer(tmp_path).config
    assert found == TokenizerConfig(
        {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}, {"default": CHATML}
    )


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "tokenizer_config.json is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"chat_template": 3}', "neither text nor a list"),
        ('{"chat_template": [{"name": "../../x", "template": "y"}]}', "cannot be a file's name"),
    ],
)
def test_a_damaged_configuration_is_refused_before_the_build(tmp_path, text, words):
    saved(tmp_path, None, False)
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(CaptureError, match=words):
        accel.optimize(tmp_path, tokenizer=tmp_path)


# Hostile templates.

GROWN = "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
DOUBLED = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}CHANGE{% endfor %}{{ ns.x }}"
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.__class__.__base__ }}",
    "{{ cycler.__init__.__globals__.os.system('id') }}", "{{ self._TemplateReference__context }}{{ self.__init__.x }}",
    "{{ raise_exception.__globals__['os'] }}", "{{ (messages|attr('__class__')).__base__ }}",
    "{{ '{0.__class__.__init__}'.format(messages) }}", "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages[0].clear() }}", "{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{% extends 'x' %}",
    "{{ environment.tick.x }}", "{{ lipsum.__globals__ }}",
]  # fmt: skip
ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(80) }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}",
]
LARGE = [
    "{% for i in range(1000000000) %}{% endfor %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 'a' * 10000000000 }}", "{{ 10000000000 * [0] }}", "{{ 2 ** 10000000000 }}", "{{ '%9999999999d' % 1 }}",
    "{{ '%(a)09999999999d' % {'a': 1} }}", "{{ '%*d' % (10000000000, 1) }}", "{{ '%.99999999f' % 0.1 }}",
    "{{ '%9999999999d' | format(1) }}", "{{ '{:9999999999}'.format(1) }}", "{{ '{:{w}}'.format(1, w=9999999999) }}",
    "{{ '{a:9999999999}'.format_map({'a': 1}) }}",
    "{{ 'a' | center(10000000000) }}", "{{ 'a'.ljust(10000000000) }}", "{{ 'a\tb'.expandtabs(10000000000) }}",
    "{{ [1] | batch(10000000000, 'x') | list }}", "{{ 1.5 | round(1000000000) }}", "{{ (1).to_bytes(10000000000) }}",
    "{{ messages | tojson(indent=1000000000) }}", "{{ (['c' * 8000000] * 10000) | join('') }}",
    "{{ ('c' * 8000000).join(['a'] * 10000) }}", "{{ ('a' * 8000).replace('a', 'b' * 8000) }}",
    DOUBLED.replace("CHANGE", "{% set ns.x = ns.x ~ ns.x %}"),
    DOUBLED.replace("CHANGE", "{% set ns.x = ns.x + ns.x %}"),
    DOUBLED.replace("CHANGE", "{% set b %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = b %}"),
    GROWN + "{{ ns.x }}", GROWN + "{{ ns.x | tojson }}", GROWN + "{{ ns.x ~ '' }}", GROWN + "{{ '%s' % ns.x }}",
    GROWN + "{{ '{}'.format(ns.x) }}", GROWN + "{{ ns.x | string }}", GROWN + "{{ ns }}",
]  # fmt: skip

TWINS = (
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}"
)
TWINS += "{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
TUPLES = TWINS.replace("[ns.x, ns.x]", "(ns.x, ns.x)").replace("x=[1]", "x=(1,)")
FROZEN = [  # one call in C of 2^40 steps, which looks at no clock
    TWINS + "{{ ns.x == ns.y }}", TWINS + "{{ ns.x < ns.y }}", TWINS + "{{ [ns.x, ns.y] | sort | length }}",
    TWINS + "{{ [ns.x].count(ns.y) }}", TWINS + "{{ ns.x in [ns.y] }}", TWINS + "{{ [ns.x, ns.y] | max | length }}",
    TUPLES + "{{ {ns.x: 1} | length }}",
    TUPLES + "{{ [ns.x] | unique | list | length }}",
]  # fmt: skip
GREEDY = [  # far more memory than the size of a text that is allowed
    "{{ ('a' * 8000000).translate({97: 'b' * 8000}) }}",
    "{{ ('a ' * 200000) | wordwrap(1, wrapstring='b' * 8000) }}",
    "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = ns.x + ['a' * 8000000 ~ i] %}{% endfor %}",
]


def rendered(source):
    messages = say(("user", "x"))
    try:
        return chat.render(TokenizerConfig({}, {"default": source}), messages)
    finally:
        assert messages == say(("user", "x"))


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_reaches_nothing_but_data(source):
    try:
        assert rendered(source) == "", "an unsafe attribute is undefined: it prints as nothing"
    except (ArtifactError, InputError) as error:
        assert "unsafe" in str(error) or "undefined" in str(error) or "no loader" in str(error)


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_that_does_not_end_is_stopped(source, monkeypatch):
    monkeypatch.setattr(chat, "SECONDS", 0.2)
    with pytest.raises(
        ArtifactError, match="was stopped: it took more than 0.2 s; do not trust it|recursion"
    ):
        rendered(source)


@pytest.mark.parametrize("source", LARGE)
def test_a_template_that_makes_too_much_is_stopped(source, monkeypatch):
    monkeypatch.setattr(chat, "SIZE", min(chat.SIZE, 1 << 16) if "80" not in source else chat.SIZE)
    with pytest.raises(ArtifactError, match="the chat template was stopped: .*do not trust it"):
        rendered(source)


@pytest.mark.few(4)
@pytest.mark.parametrize("source", FROZEN)
def test_a_template_that_no_clock_interrupts_is_stopped(source, monkeypatch):
    """And the next one renders."""
    monkeypatch.setattr(chat, "SECONDS", 0.1)
    monkeypatch.setattr(chat, "_GRACE", 0.1)
    with pytest.raises(ArtifactError, match="was stopped: it took more than 0.1 s; do not trust"):
        rendered(source)
    assert rendered("{{ messages[0].content }}") == "x"


@pytest.mark.parametrize("source", GREEDY)
def test_a_template_that_takes_too_much_memory_is_stopped(source):
    with pytest.raises(ArtifactError, match="was stopped: (it makes a value of size|.*memory).*"):
        rendered(source)
    assert rendered("{{ messages[0].content }}") == "x"


def test_a_process_that_renders_ends_with_its_parent():
    """Whatever it is at, and it is used again while all goes well."""
    code = "import os, sys; from accel.runtime.inputs import chat, tokenizer_config as t; "
    code += "say = lambda: chat.render(t.TokenizerConfig(), [{'role': 'user'}], chat_template='{{ 1 }}'); "
    code += "say(); say(); (one,) = chat._children()._idle; print(one._process.pid, flush=True); os._exit(0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    end = time.monotonic() + 20
    while alive(int(done.stdout)):
        assert time.monotonic() < end
        time.sleep(0.01)


def alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_what_a_message_may_hold():
    """Subclasses of plain data are that data; others are named."""

    class Name(str):
        pass

    class Talk(dict):
        pass

    talk = [Talk(role=Name("user"), content=Name("hi"))]
    assert chat.render(TokenizerConfig(), talk, chat_template="{{ messages[0].content }}") == "hi"
    for value, said in ((object(), "hold a object"), (nested(50_000), "nested too deeply")):
        with pytest.raises(InputError, match=said):
            chat.render(TokenizerConfig(), talk, chat_template="{{ x }}", x=value)


def nested(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


def test_what_is_printed_at_length_is_stopped(monkeypatch):
    monkeypatch.setattr(chat, "SIZE", 1000)
    assert len(rendered("{% for i in range(100) %}0123456789{% endfor %}")) == 1000
    with pytest.raises(ArtifactError, match="size 1,010; at most 1,000"):
        rendered("{% for i in range(200) %}0123456789{% endfor %}")


def test_a_template_that_is_no_jinja():
    with pytest.raises(
        ArtifactError, match="no Jinja template: line 2: .*; give a prompt of plain text"
    ):
        rendered("a\n{% if %}")
    with pytest.raises(InputError, match="no Jinja template: line 1: .*; correct it"):
        chat.render(TokenizerConfig(), say(("user", "x")), chat_template="{% if %}")


# An artifact.


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    models.wordy("chat").save_pretrained(folder / "hf")
    saved(folder / "hf", {"default": LLAMA, "short": "{{ messages[0].content }}"}, True)
    accel.optimize(folder / "hf", out=folder / "artifact", max_batch=2, verify=False).close()
    with accel.load(folder / "artifact") as model:
        yield model


@pytest.mark.long
def test_messages_are_a_prompt(built):
    messages = CONVERSATIONS[2]
    ids = theirs(LLAMA).apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids.count(0) == 1, "the begin token once"
    want = built.generate(ids, 8)
    assert built.generate(messages, 8).tokens == want.tokens
    assert built.generate(tuple(messages), 8).tokens == want.tokens
    assert "".join(built.stream(messages, 8)) == want.text[0]
    assert "".join(built.stream([messages], 8)) == want.text[0]
    both = built.generate([messages, CONVERSATIONS[0]], 8)
    assert both.tokens == [*want.tokens, *built.generate(CONVERSATIONS[0], 8).tokens]
    given = {"tools": TOOLS, "day": "3 May"}
    text = theirs(LLAMA).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **given
    )
    want = built.generate(built.tokenizer.encode(text, special=False), 8)
    assert built.generate(messages, 8, chat_template_kwargs=given).tokens == want.tokens
    short = built.generate(messages, 8, chat_template_kwargs={"chat_template": "short"})
    assert (
        short.tokens == built.generate(built.tokenizer.encode("Be brief.", special=False), 8).tokens
    )


def test_calls_that_are_wrong(built, tmp_path):
    with pytest.raises(InputError, match="chat_template_kwargs are for messages"):
        built.generate("text", 2, chat_template_kwargs={})
    with pytest.raises(InputError, match="message 0 has no role"):
        built.generate([{"content": "x"}], 2)
    shutil.copytree(built.artifact.path, tmp_path / "a")
    for name in ("chat_template.jinja", "additional_chat_templates/short.jinja"):
        (tmp_path / "a" / name).unlink()
    manifest = json.loads((tmp_path / "a" / "accel.json").read_text())
    write_manifest(tmp_path / "a", manifest, bind(tmp_path / "a", manifest))
    (tmp_path / "a" / "chat_template.jinja").write_text("listed nowhere, read by nobody")
    with accel.load(tmp_path / "a") as model:
        with pytest.raises(
            InputError, match="has no chat template: .* Give a prompt of plain text"
        ):
            model.generate(CONVERSATIONS[0], 2)


def test_a_model_without_a_tokenizer_takes_no_messages():
    with accel.optimize(models.tiny(), target="eager") as model:
        with pytest.raises(InputError, match="list of messages, but this model has no tokenizer"):
            model.generate(CONVERSATIONS[0], 2)
