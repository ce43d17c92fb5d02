"""Chats in the formats that people have, recognised by the fields of a record.

Each becomes a `Chat`: messages with roles, or a prompt with its completion.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from zero.core.suggest import some
from zero.errors import ConfigError, in_short
from zero.trainer.data.records import Record

ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "model": "assistant", "assistant": "assistant", "system": "system", "developer": "developer",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "assistant",
}  # fmt: skip
"""Roles in files -> roles of chat templates."""


class Chat(NamedTuple):
    """A chat, of which the assistant's turns train.

    Attributes:
        messages: dicts with role and content, as chat templates take them.
        first: messages before this one do not train, because they are a prompt.
        texts: a prompt and its completion without roles, in place of messages.
        tools: descriptions of tools, for the template.
        arguments: further arguments of the template.
    """

    messages: Sequence[Mapping[str, Any]]
    first: int = 0
    texts: tuple[str, str] | None = None
    tools: Sequence[Any] | None = None
    arguments: Mapping[str, Any] = {}


def chat_of(record: Record) -> tuple[str, Chat]:
    """Return the name of the record's format, and its chat.

    Raises:
        ConfigError: the record has no known format, or a message has no known role.
    """
    fields = {name: value for name, value in record.fields.items() if value is not None}
    for name, (needed, read) in FORMATS.items():
        if all(field in fields for field in needed):
            return name, _with_tools(read(fields, record.where), fields, record.where)
    raise ConfigError(
        f"data.path: {record.where} is no chat: it has {some(list(record.fields)) or 'no fields'}. Give messages, "
        "conversations, prompt and completion, or instruction and output."
    )


def _messages(values: object, where: str) -> list[dict[str, Any]]:
    """Return messages with the roles and names of chat templates."""
    if isinstance(values, Sequence) and not values:
        raise ConfigError(f"data.path: {where}: messages are empty. Remove this record.")
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ConfigError(f"data.path: {where}: messages are {type(values).__name__}, not a list of messages.")
    messages = []
    for value in values:
        fields = {name: each for name, each in value.items() if each is not None} if isinstance(value, Mapping) else {}
        role = fields.pop("role", None) or fields.get("from")
        if not isinstance(role, str) or role not in ROLES:
            shown = f"the role {role!r}" if role is not None else "no role"
            raise ConfigError(f"data.path: {where}: a message has {shown}. Known are {some(list(ROLES))}.")
        if not {"content", "value", "tool_calls"} & fields.keys():
            raise ConfigError(f"data.path: {where}: a message of the role {role!r} has no content. Remove this record.")
        content = _content(fields.pop("content", fields.get("value", "")), where)
        others = {name: each for name, each in fields.items() if name not in ("from", "value")}
        message = {**others, "role": ROLES[role], "content": content}
        if "tool_calls" in message:
            calls = _read(message["tool_calls"], "tool_calls", where)
            if not isinstance(calls, list):
                raise ConfigError(f"data.path: {where}: tool_calls are {type(calls).__name__}, not a list.")
            message["tool_calls"] = [_with_read_arguments(call) for call in calls]
        messages.append(message)
    return messages


def _content(content: object, where: str) -> str:
    """Return the text of a message, which may be a list of parts."""
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    if not isinstance(content, str):
        raise ConfigError(f"data.path: {where}: a message holds {type(content).__name__}, not text or parts of text.")
    return content


def _read(value: Any, name: str, where: str) -> Any:
    """Return a value that files may have as a text of JSON; None for an empty text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError as error:
        raise ConfigError(f"data.path: {where}: {name} are not JSON: {in_short(error)}") from error


def _with_read_arguments(call: Any) -> Any:
    """Return a tool call whose arguments are a dict; many files have them as a text of JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        read = {**function, "arguments": json.loads(function["arguments"])}
    except ValueError:
        return call
    return {**call, "function": read} if "function" in call else read


def _with_tools(chat: Chat, fields: Mapping[str, Any], where: str) -> Chat:
    tools, arguments = (_read(fields.get(name), name, where) for name in ("tools", "chat_template_kwargs"))
    return chat._replace(tools=tools or None, arguments=arguments or {})


def _of_prompt(fields: Mapping[str, Any], where: str) -> Chat:
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Chat((), texts=(prompt, completion))
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ConfigError(f"data.path: {where}: prompt and completion are a text and a list. Make both the same.")
    before = _messages(prompt, where)
    return Chat([*before, *_messages(completion, where)], first=len(before))


def _of_instruction(fields: Mapping[str, Any], where: str) -> Chat:
    asked = [str(fields[name]) for name in ("instruction", "input") if fields.get(name)]
    user = {"role": "user", "content": "\n\n".join(asked)}
    return Chat([user, {"role": "assistant", "content": str(fields["output"])}])


Format = tuple[tuple[str, ...], Callable[[Mapping[str, Any], str], Chat]]

FORMATS: Mapping[str, Format] = {
    "messages": (("messages",), lambda fields, where: Chat(_messages(fields["messages"], where))),
    "conversations": (("conversations",), lambda fields, where: Chat(_messages(fields["conversations"], where))),
    "prompt and completion": (("prompt", "completion"), _of_prompt),
    "instruction and output": (("instruction", "output"), _of_instruction),
}
"""Name of a format -> the fields by which it is recognised, and a function of a record's fields and its place."""
