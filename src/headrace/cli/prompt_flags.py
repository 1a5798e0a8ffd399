"""Prompts on the command line: text, token ids, or a chat in a JSON file."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from headrace.common.errors import InvalidRequest, Violation
from headrace.gateway_api.v1 import generation_pb2 as pb


def add_prompt_arguments(parser: argparse.ArgumentParser, *, ids_flag: str, ids_help: str) -> None:
    """Adds the ways to give a prompt, of which exactly one is taken."""
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--text", metavar="TEXT", help="the prompt")
    prompt.add_argument("--text-file", metavar="FILE", help="file that holds the prompt; - is standard input")
    prompt.add_argument(
        "--chat-json",
        metavar="FILE",
        help="file with a JSON list of messages (role, content), or an object with messages, tools, "
        "template_variables, add_generation_prompt, continue_final_message; - is standard input",
    )
    prompt.add_argument(ids_flag, dest="token_ids", metavar="1,2,3", help=ids_help)


def read_prompt(arguments: argparse.Namespace) -> pb.Prompt:
    """The prompt that was given; InvalidRequest if a file or number is not what it should be."""
    text = arguments.text
    if arguments.text_file is not None:
        text = _read(arguments.text_file, "prompt.text")
    if text is not None:
        try:
            return pb.Prompt(text=text)
        except UnicodeEncodeError as error:
            raise _invalid("prompt.text", "is not valid UTF-8") from error
    if arguments.chat_json is not None:
        return pb.Prompt(chat=_chat(arguments.chat_json))
    try:
        return pb.Prompt(token_ids=pb.TokenIds(ids=parse_ids(arguments.token_ids)))
    except ValueError as error:
        raise _invalid("prompt.token_ids", str(error)) from error


def parse_ids(text: str) -> list[int]:
    """Numbers with commas between them; ValueError names the first one that is none."""
    ids = []
    for word in text.split(",") if text.strip() else []:
        try:
            ids.append(int(word))
        except ValueError:
            raise ValueError(f"must be whole numbers with commas between them; got {word!r}") from None
    return ids


def _chat(name: str) -> pb.Chat:
    field, shown = "prompt.chat", _shown(name)
    try:
        content = json.loads(_read(name, field))
    except ValueError as error:
        raise _invalid(field, f"{shown} is not JSON: {error}") from error
    if isinstance(content, list):
        content = {"messages": content}
    if not isinstance(content, dict):
        raise _invalid(field, f"{shown} must hold a list of messages or an object with messages")
    known = {"messages", "tools", "template_variables", "add_generation_prompt", "continue_final_message"}
    if unknown := sorted(set(content) - known):
        raise _invalid(field, f"{shown} has unknown keys: {', '.join(unknown)}")
    try:
        chat = pb.Chat(
            messages=[_message(message) for message in _value(content, "messages", list) or []],
            tools=[_json_text(tool) for tool in _value(content, "tools", list) or []],
            continue_final_message=_value(content, "continue_final_message", bool) or False,
            template_variables=_json_text(content["template_variables"]) if "template_variables" in content else "",
        )
        if (add := _value(content, "add_generation_prompt", bool)) is not None:
            chat.add_generation_prompt = add
    except UnicodeEncodeError as error:
        raise _invalid(field, f"{shown}: is not valid UTF-8") from error
    except ValueError as error:
        raise _invalid(field, f"{shown}: {error}") from error
    return chat


def _message(message: Any) -> pb.ChatMessage:
    if not isinstance(message, dict):
        raise ValueError(f"a message must be an object with role and content; got {message!r}")
    known = {"role", "content", "tool_calls", "tool_call_id", "reasoning_content"}
    if unknown := sorted(set(message) - known):
        raise ValueError(f"a message has unknown keys: {', '.join(unknown)}")
    parts = message["content"] if isinstance(message.get("content"), list) else None
    return pb.ChatMessage(
        role=_value(message, "role", str) or "",
        content=_value(message, "content", str) or "" if parts is None else "",
        parts=[pb.ContentPart(text=_text_of(part)) for part in parts or []],
        tool_calls=[_json_text(call) for call in _value(message, "tool_calls", list) or []],
        tool_call_id=_value(message, "tool_call_id", str) or "",
        reasoning_content=_value(message, "reasoning_content", str) or "",
    )


def _value(content: dict[str, Any], key: str, kind: type) -> Any:
    """The value of a key, None if there is none or it is null; ValueError if it is not of that type."""
    value = content.get(key)
    if value is None or isinstance(value, kind):
        return value
    wanted = {list: "a list", str: "a text", bool: "true or false"}[kind]
    raise ValueError(f"{key} must be {wanted}; got {value!r}")


def _text_of(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    raise ValueError('a part of a message must be {"type": "text", "text": "..."}')


def _json_text(value: Any) -> str:
    """JSON travels as text; keys keep their order."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _read(name: str, field: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _invalid(field, f"{_shown(name)} cannot be read: {error}") from error


def _shown(name: str) -> str:
    return "standard input" if name == "-" else name


def _invalid(field: str, description: str) -> InvalidRequest:
    return InvalidRequest([Violation(field, description)])
