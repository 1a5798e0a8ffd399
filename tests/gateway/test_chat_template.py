"""Chat templates: equal to transformers, and harmless whatever they do."""

import json
import os
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headrace.common.byte_tokenizer import byte_tokenizer_files
from headrace.common.errors import InvalidRequest, Overloaded, StartupError
from headrace.common.model_files import resolve_model
from headrace.common.tokenizer_files import TokenizerFiles, load_tokenizer_files
from headrace.gateway.chat_template import ChatTemplate, TemplateLimits
from headrace.gateway.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}
USER = {"role": "user", "content": "Hi <b>&amp;</b> 'quoted' \"text\" — 👍"}
CHAT = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": " Hello. "}, USER]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "météo",
            "description": "Weather <now> & later",
            "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}},
        },
    }
]
TOOL_CHAT = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "météo", "arguments": {"z": "é", "a": 1}}}],
    },
    {"role": "tool", "content": "12°", "tool_call_id": "1"},
    {"role": "assistant", "content": "Cold.", "reasoning_content": "12 is little."},
]

CHATML = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|system|>\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n" }}
{%- endif %}
{% for message in messages %}
    {% if message.role == "assistant" and message.tool_calls %}
        {% for call in message.tool_calls %}
{{ '<|call|>' + call.function.name + ' ' + call.function.arguments | tojson(indent=2) }}
        {% endfor %}
    {% elif message.content is defined %}
{{ '<|' + message.role + '|>' }}
{{ message.content | trim }}{{ eos_token }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}
"""
NAMESPACES = """\
{% set ns = namespace(count=0, last=none) %}
{% for message in messages if message.role != 'system' %}
  {% if loop.index0 % 2 == 1 and message.role == 'user' %}{% continue %}{% endif %}
  {% set ns.count = ns.count + 1 %}
  {% set ns.last = message %}
{{ loop.index }}:{{ message['role'][:1] | upper }}:{{ message.content | default('-', true) | length }}
  {% if ns.count > 2 %}{% break %}{% endif %}
{% endfor %}
{{ ns.count }} {{ ns.last.role }} {{ documents }} {{ tools is none }} {{ unknown is defined }}
{% set d = dict(a=1, b=[1, 2.5, none, true]) %}
{{ d | tojson }} {{ d.items() | list }} {{ "é" | tojson(ensure_ascii=True) }} {{ d | tojson(separators=(',', ':')) }}
"""
GENERATION = """\
{% macro turn(role, text) %}
[{{ role }}] {{ text }}
{% endmacro %}
{% for message in messages %}
{% if message.role == 'assistant' %}
{% generation %}
{% set inner = message.content %}
{{ turn('model', inner) }}
{% endgeneration %}
{{ inner is defined }}
{% else %}
{{ turn(message.role, message.content) }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '[model] ' }}{% endif %}"""
REASONING = """\
{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content is defined %}\
({{ m.reasoning_content }}|{{ m.thinking }}){% endif %}{{ m.content }}</{{ m.role }}>
{% endfor %}"""
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
TRIMMING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
VARIABLES = "{{ mood }} {{ bos_token }} {{ messages[0].role }} {{ strftime_now('%Y') | length }}"

LIMITS = TemplateLimits(cpu_seconds=0.5, max_chars=100_000, memory_bytes=256 * 2**20)


def render(source: str, messages: list[dict[str, Any]] = CHAT, **options: Any) -> str:
    with closing(ChatTemplate(source, special_tokens=SPECIAL)) as template:
        return template.render(messages, **options)


def reference(
    source: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    variables: dict[str, Any] | None = None,
    **options: Any,
) -> str:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer_files().build_tokenizer())
    tokenizer.add_special_tokens(SPECIAL)
    prompt: str = tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=source, tokenize=False, **options, **(variables or {})
    )
    return prompt


@pytest.mark.parametrize("source", [CHATML, NAMESPACES, GENERATION, REASONING, PLAIN, TRIMMING])
@pytest.mark.parametrize("messages", [[USER], CHAT, TOOL_CHAT])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_prompts_equal_those_of_transformers(
    source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, add_generation_prompt: bool
) -> None:
    options: dict[str, Any] = {"tools": tools, "add_generation_prompt": add_generation_prompt}
    assert render(source, messages, **options) == reference(source, messages, **options)


@pytest.mark.parametrize("source", [CHATML, PLAIN, TRIMMING, REASONING])
@pytest.mark.parametrize(
    "final", ["Well, ", "Well,", "  ", [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}], "a<b>"]
)
def test_continued_prompts_equal_those_of_transformers(source: str, final: Any) -> None:
    if isinstance(final, list) and source in (CHATML, TRIMMING):
        pytest.skip("this template takes text only")
    messages = [USER, {"role": "assistant", "content": final}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(source, messages, **options) == reference(source, messages, **options)


def test_a_variable_may_have_any_name() -> None:
    assert render("{{ args }}{{ template }}", variables={"self": 1, "args": 2, "template": 3}) == "23"


def test_variables_equal_those_of_transformers_and_replace_special_tokens() -> None:
    variables = {"mood": {"é": [1, None]}, "bos_token": "<other>"}
    expected = reference(VARIABLES, CHAT, variables=variables)
    assert render(VARIABLES, variables=variables) == expected
    assert "<other>" in expected


def test_a_template_for_tools_is_used_when_there_are_tools() -> None:
    config = {"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}
    files = dict(byte_tokenizer_files().files) | {"tokenizer_config.json": json.dumps(config).encode()}
    template = ChatTemplate.from_files(TokenizerFiles.from_files(files))
    assert template is not None
    with closing(template):
        assert template.render([USER]) == "d"
        assert template.render([USER], tools=TOOLS) == "t"


def test_a_model_without_template_has_none() -> None:
    assert ChatTemplate.from_files(byte_tokenizer_files()) is None


# Which limit is met first depends on the machine.
OUT_OF_BOUNDS = "processor time|MemoryError"
HOSTILE = {
    "a range of a billion": ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    "nested loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "processor time",
    ),
    "doubling text": (
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        OUT_OF_BOUNDS,
    ),
    "doubling lists": (
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        OUT_OF_BOUNDS,
    ),
    "much output": ("{% for i in range(9999) %}{{ 'x' * 999 }}{% endfor %}", "longer than 100000 characters"),
    "a wide field": ("{{ 'a' | center(10**10) }}", OUT_OF_BOUNDS),
    "a huge power": ("{% set n = messages[0].n %}{{ (n ** (n ** n)) is odd }}", OUT_OF_BOUNDS),
    "endless recursion": ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "RecursionError"),
    "branching recursion": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "processor time",
    ),
}


@pytest.mark.parametrize(("source", "complaint"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_templates_end_and_the_next_request_works(source: str, complaint: str) -> None:
    source = "{% if hostile %}" + source + "{% else %}fine{% endif %}"
    with closing(ChatTemplate(source, limits=LIMITS)) as template:
        with pytest.raises(InvalidRequest, match=complaint) as caught:
            template.render([{"role": "user", "n": 9}], variables={"hostile": True})
        assert [violation.field for violation in caught.value.violations] == ["prompt.chat"]
        assert template.render([USER]) == "fine"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.x }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{{ ''.format.__self__.x }}{{ '{0.__class__}'.format(1) }}",
    ],
)
def test_the_sandbox_lets_nothing_out(source: str) -> None:
    with closing(ChatTemplate(source, limits=LIMITS)) as template, pytest.raises(InvalidRequest, match="failed"):
        template.render([USER])


def test_a_refusal_keeps_the_templates_own_words() -> None:
    with pytest.raises(InvalidRequest, match=r"prompt\.chat: the chat template refused the messages: roles must alter"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_failure_names_its_kind() -> None:
    with pytest.raises(InvalidRequest, match=r"failed: UndefinedError: .*nothing"):
        render("{{ messages[0].nothing.more }}")


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="UnicodeEncodeError"):
        render("{{ x }}", variables={"x": "\ud83d"})


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("a\nb {% if x %}", "line 2: Unexpected end of template"),
        ("\n\n{{ x | nofilter }}", "line 3: No filter named 'nofilter'"),
        ("{% for %}", "line 1"),
    ],
)
def test_a_template_that_does_not_compile_is_a_start_up_error_with_its_line(source: str, complaint: str) -> None:
    with pytest.raises(StartupError, match=complaint):
        ChatTemplate(source)


def test_a_template_that_eats_the_machine_while_compiling_is_a_start_up_error() -> None:
    with pytest.raises(StartupError, match=r"cannot be compiled: it took more than 0\.5 s of processor time"):
        ChatTemplate("{{ 9 ** (9 ** 9) }}", limits=LIMITS)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"messages": []}, "prompt.chat.messages"),
        ({"continue_final_message": True}, "prompt.chat.continue_final_message"),
        ({"variables": {"messages": []}}, "prompt.chat.template_variables"),
        (
            {
                "messages": [{"role": "assistant"}],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
            "prompt.chat.continue_final_message",
        ),
    ],
)
def test_bad_requests_are_refused_by_field(options: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(PLAIN, **options)
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize("source", ["nothing", "{{ messages[-1].content[:2] }}", "{{ messages[0].content }}"])
def test_a_final_message_that_the_template_does_not_print_cannot_be_continued(source: str) -> None:
    messages = [USER, {"role": "assistant", "content": "Well"}]
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        render(source, messages, add_generation_prompt=False, continue_final_message=True)


def test_a_killed_worker_fails_one_request_only() -> None:
    with closing(ChatTemplate(PLAIN)) as template:
        process = template._worker._process
        process.kill()
        process.wait()
        with pytest.raises(Overloaded, match=r"lost its process \(exit code -9\)"):
            template.render([USER])
        assert template.render([{"role": "a", "content": "b"}]) == "<a>b</a>"


def test_a_worker_that_gets_no_time_is_given_up() -> None:
    with closing(ChatTemplate(PLAIN, limits=TemplateLimits(wall_seconds=2.0))) as template:
        os.kill(template._worker._process.pid, 19)  # SIGSTOP
        with pytest.raises(Overloaded, match="took more than 2 s"):
            template.render([USER])


def test_closing_ends_the_process() -> None:
    template = ChatTemplate(PLAIN)
    process = template._worker._process
    template.close()
    template.close()
    assert process.returncode is not None


def test_threads_share_one_template() -> None:
    results = {}
    with closing(ChatTemplate(PLAIN)) as template:

        def work(n: int) -> None:
            results[n] = template.render([{"role": "user", "content": str(n) * 1000}])

        threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {n: f"<user>{str(n) * 1000}</user>" for n in range(16)}


def test_large_prompts_pass_whole() -> None:
    text = "é👍x" * 300_000
    assert render("{{ messages[0].content }}", [{"role": "user", "content": text}]) == text


@pytest.mark.model
def test_demo_chats_give_the_reference_ids() -> None:
    files = load_tokenizer_files(resolve_model("demo").path)
    tokenizer, template = Tokenizer.from_files(files), ChatTemplate.from_files(files)
    assert template is not None
    data = Path(__file__).parents[1] / "data" / "greedy.jsonl"
    with closing(template):
        for line in data.read_text(encoding="utf-8").splitlines():
            case = json.loads(line)
            if case["kind"] == "chat":
                prompt = template.render(case["messages"])
                assert tokenizer.encode(prompt, add_special_tokens=False) == case["prompt_token_ids"]
                assert prompt == reference(files.chat_template, case["messages"], add_generation_prompt=True)
