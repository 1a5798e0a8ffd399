"""Chat prompts that end inside their last message, so that the model goes on writing it.

A tag is put behind the message's text before rendering, and the prompt is cut where the tag comes out: what the
template prints after the message (an end-of-turn marker) is left off.
"""

from typing import Any

from headrace.common.errors import InvalidRequest, Violation

FIELD = "prompt.chat.continue_final_message"
# Ends in a space, to tell templates that keep trailing space from those that trim it.
TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def tag_final_message(messages: list[dict[str, Any]], template_source: str) -> str:
    """Puts the tag behind the text of the last message, in place, and returns that text.

    InvalidRequest if the message has no text, or the template does not print message contents.
    """
    final = messages[-1]
    content = final.get("content")
    if "content" not in template_source:
        raise _invalid("the chat template does not print the content of messages")
    if isinstance(content, str):
        final["content"] = content + TAG
        return content
    parts = content if isinstance(content, list) else []
    for index in reversed(range(len(parts))):
        part = parts[index]
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            final["content"] = [*parts[:index], {**part, "text": part["text"] + TAG}, *parts[index + 1 :]]
            text: str = part["text"]
            return text
    raise _invalid("the last message has no text to go on with")


def cut_at_tag(prompt: str, final_text: str) -> str:
    """The prompt up to the end of the last message; InvalidRequest if the template changed the message."""
    at = prompt.rfind(TAG.strip())
    if at < 0 or final_text.strip() not in prompt:
        raise _invalid("the last message does not appear in the rendered prompt: the chat template changes it")
    kept = prompt[:at]
    # A template that trims messages took the tag's own trailing space: then it would have trimmed the text's too.
    return kept if prompt.startswith(TAG, at) else kept.rstrip()


def _invalid(description: str) -> InvalidRequest:
    return InvalidRequest([Violation(FIELD, description)])
