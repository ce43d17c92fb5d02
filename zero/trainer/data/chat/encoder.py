"""Chats as tokens by a tokenizer's chat template, with a mask of the tokens of the assistant.

A template may mark the assistant's text itself (`{% generation %}`). Most do not, and transformers then returns a mask
of zeros without a word. So the mask also comes from spans: the text of a chat up to a turn is the beginning of the text
of the whole chat, and the turn's span is what follows it. A mark on another role's text is an error.

A prompt may begin a thought that a turn does not have. Then the span begins where their tokens differ. A template that
leaves out earlier thinking gives other beginnings. Then only the last turn trains.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from zero.errors import ConfigError, in_short
from zero.platform.installed import require_hf
from zero.trainer.data.chat.formats import Chat

COMPARED = 16
"""The number of chats on which the masks of the template and of spans are compared."""

TRAINS_BIT = 1 << 31
"""The bit of a token in a file, a uint32, that says whether the token trains."""

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

ASSISTANT = "assistant"


class Encoded(NamedTuple):
    """A chat as tokens.

    Attributes:
        tokens: the numbers of the tokens.
        trains: whether each token is predicted in the loss.
        only_last: whether earlier turns of the assistant do not train, because the template changes them.
    """

    tokens: list[int]
    trains: list[bool]
    only_last: bool = False


class TurnSpan(NamedTuple):
    """The characters of a turn that train in the text of a chat."""

    begin: int
    end: int


class ChatEncoder:
    """A tokenizer with its chat template.

    Args:
        path: a folder with a tokenizer that transformers can load, or its tokenizer.json.
        template: a file with a chat template; None: that of the tokenizer.
        end: the number of the token behind a completion without a template.

    Attributes:
        template: the text of the template.
        marks: whether the template's own marks are used.

    Raises:
        ConfigError: transformers cannot load the tokenizer, or the template file cannot be read.
    """

    def __init__(self, path: str, template: str | None, end: int) -> None:
        require_hf("transformers", "data=chat needs")
        import transformers

        place = Path(path)
        folder = place if place.is_dir() else place.parent
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # transformers raises many kinds
            raise ConfigError(f"data.tokenizer={path}: transformers cannot load it: {in_short(error)}") from error
        if not self._tokenizer.is_fast:
            raise ConfigError(f"data.tokenizer={path} has no tokenizer.json. Save it with a fast tokenizer.")
        if template is not None:
            try:
                self._tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"data.template={template} cannot be read: {in_short(error)}") from error
        self._path, self._end = path, end
        self.template, self.marks = self._tokenizer.chat_template or "", False
        self._specials = [str(token) for token in self._tokenizer.added_tokens_encoder]
        begins = self._tokenizer("")["input_ids"][:1]
        self._first = begins if begins == [self._tokenizer.bos_token_id] else []

    def compare(self, chats: Sequence[tuple[Chat, str]]) -> None:
        """Choose between the template's marks and spans by the first chats.

        Args:
            chats: chats with their places, for messages.

        Raises:
            ConfigError: the template marks text of other roles.
        """
        if not isinstance(self.template, str) or not GENERATION.search(self.template):
            return
        for chat, where in chats:
            if chat.texts is not None:
                continue
            marked = self._marked(chat, where)
            if marked is None or chat.first:
                continue
            self.marks = True
            text = self._text(chat, chat.messages, where)
            tokens, offsets = self._tokens(text, where)
            if marked.tokens != tokens:
                continue
            others = _others(chat, text)
            for trains, (begin, end) in zip(marked.trains, offsets, strict=True):
                if trains and any(first <= begin and end <= last for first, last in others):
                    raise ConfigError(
                        f"data.path: {where}: the chat template marks {text[begin:end]!r} as the assistant's, but it "
                        "is of another role. Correct the {% generation %} of the template, or remove it."
                    )

    def encode(self, chat: Chat, where: str) -> Encoded:
        """Return the tokens of a chat.

        Args:
            where: the chat's place, for messages.

        Raises:
            ConfigError: the template does not accept the chat, or there is none.
        """
        if chat.texts is not None:
            tokens, offsets = self._tokens("".join(chat.texts), where)
            trains = [end > len(chat.texts[0]) for _, end in offsets]
            first = [] if tokens[:1] == self._first else self._first
            last = [] if tokens[-1:] == [self._end] else [self._end]
            return Encoded([*first, *tokens, *last], [*[False] * len(first), *trains, *[True] * len(last)])
        if self.marks and not chat.first and (marked := self._marked(chat, where)) is not None:
            return marked
        text, spans, only_last = self._spans(chat, where)
        tokens, offsets = self._tokens(text, where)
        trains = [any(span.begin <= begin and end <= span.end for span in spans) for begin, end in offsets]
        return Encoded(tokens, trains, only_last)

    def asked(self, text: str, *, as_message: bool) -> list[int]:
        """Return the tokens of a prompt, up to where the answer begins.

        Args:
            as_message: make it a message of the user, if there is a template.
        """
        if not (as_message and self.template):
            tokens = self._tokens(text, "a prompt")[0]
            return tokens if tokens[:1] == self._first else [*self._first, *tokens] or [self._end]
        messages = ({"role": "user", "content": text},)
        return self._tokens(self._text(Chat(messages), messages, "a prompt", add_generation_prompt=True), "a prompt")[0]

    def shown(self, encoded: Encoded) -> Iterator[tuple[str, bool]]:
        """Yield the parts of a chat's text, and whether they train."""
        parts: list[tuple[list[int], bool]] = []
        for token, trains in zip(encoded.tokens, encoded.trains, strict=True):
            if not parts or parts[-1][1] != trains:
                parts.append(([], trains))
            parts[-1][0].append(token)
        for tokens, trains in parts:
            yield self._tokenizer.decode(tokens), trains

    # -- the two masks -------------------------------------------------------------------------------------------------

    def _marked(self, chat: Chat, where: str) -> Encoded | None:
        """Return the tokens with the template's own mask; None if the mask is empty."""
        made = self._applied(
            chat, chat.messages, where, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        trains = [bool(mark) for mark in made["assistant_masks"]]
        return Encoded(list(made["input_ids"]), trains) if any(trains) else None

    def _spans(self, chat: Chat, where: str) -> tuple[str, list[TurnSpan], bool]:
        """Return the text of a chat, the spans that train, and whether these are of the last turn alone."""
        whole, messages = self._text(chat, chat.messages, where), chat.messages
        turns = [n for n, message in enumerate(messages) if message["role"] == ASSISTANT and n >= chat.first]
        spans: list[TurnSpan] = []
        for number in turns:
            begin, end = self._begin(whole, chat, number, where), self._end_of_turn(whole, chat, number, where)
            if begin is None or end is None or end < begin:
                break
            spans.append(self._span(whole, begin, end))
        else:
            return whole, spans, False
        last = len(messages) - 1
        begin = self._begin(whole, chat, last, where) if turns[-1] == last else None
        return whole, [] if begin is None else [self._span(whole, begin, len(whole))], True

    def _begin(self, whole: str, chat: Chat, number: int, where: str) -> int | None:
        """Return where the answer of turn `number` begins; None if earlier messages have another text in `whole`."""
        prompt = self._beginning(chat, number, where)
        if prompt is None or whole.startswith(prompt):
            return None if prompt is None else len(prompt)
        before = self._beginning(chat, number, where, turn=False)
        if before is None or not whole.startswith(before):
            return None
        tokens, offsets = self._tokens(whole, where)
        pairs = zip(self._tokens(prompt, where)[0], tokens, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return max(len(before), offsets[shared][0] if shared < len(offsets) else len(whole))

    def _end_of_turn(self, whole: str, chat: Chat, number: int, where: str) -> int | None:
        """Return where turn `number` ends; None if it has another text in `whole` than at the end of a chat."""
        if number == len(chat.messages) - 1:
            return len(whole)
        end = self._beginning(chat, number + 1, where, turn=False)
        if end is not None and not whole.startswith(end):
            end = end.removesuffix(self._tokenizer.eos_token or "")  # which a template may add behind the last turn
        return len(end) if end is not None and whole.startswith(end) else None

    def _beginning(self, chat: Chat, count: int, where: str, *, turn: bool = True) -> str | None:
        """Return the text of the first `count` messages; None if the template does not accept these alone.

        Args:
            turn: also the text that begins a turn of the assistant.
        """
        asked = ({"role": "user", "content": "x"},)
        try:
            if count:
                return self._text(chat, chat.messages[:count], where, add_generation_prompt=turn)
            if not turn:
                return ""
            # no template accepts an empty chat: the text that it adds behind a question
            whole = self._text(chat, asked, where, add_generation_prompt=True)
            return whole.removeprefix(self._text(chat, asked, where))
        except ConfigError:
            return None

    def _span(self, text: str, begin: int, end: int) -> TurnSpan:
        """Return a span without white space behind the token that ends a turn."""
        stripped = len(text[:end].rstrip())
        ends = stripped > begin and any(text.endswith(token, begin, stripped) for token in self._specials)
        return TurnSpan(begin, stripped if ends else end)

    # -- the tokenizer -------------------------------------------------------------------------------------------------

    def _tokens(self, text: str, where: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of a text, without special tokens around it, and the characters of each."""
        try:
            made = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        except TypeError as error:  # of the tokenizer, for a lone surrogate
            raise ConfigError(f"data.path: {where} holds text that is not valid: {in_short(error)}") from error
        return made["input_ids"], made["offset_mapping"]

    def _text(self, chat: Chat, messages: Sequence[Mapping[str, Any]], where: str, **how: Any) -> str:
        return str(self._applied(chat, messages, where, tokenize=False, **how))

    def _applied(self, chat: Chat, messages: Sequence[Mapping[str, Any]], where: str, **how: Any) -> Any:
        if not self.template:
            raise ConfigError(
                f"data.tokenizer={self._path} has no chat template, which {where} needs. Set data.template=FILE."
            )
        try:
            return self._tokenizer.apply_chat_template(messages, tools=chat.tools, **chat.arguments, **how)
        except Exception as error:  # Jinja's errors, and those of the template's own code
            raise ConfigError(f"data.path: {where}: the chat template fails: {in_short(error)}") from error


def _others(chat: Chat, text: str) -> list[tuple[int, int]]:
    """Return the characters of the messages of other roles than the assistant's in the text of a chat."""
    after, others = 0, list[tuple[int, int]]()
    for message in chat.messages:
        content = str(message["content"]).strip()
        begin = text.find(content, after)
        if content and begin >= 0:
            after = begin + len(content)
            others += [(begin, after)] * (message["role"] != ASSISTANT)
    return others
