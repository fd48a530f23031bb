"""What worlds ask for and what back ends answer: chat messages, requests and replies as plain frozen records (host).

A dialogue world (`papyrax.envs.protocol.DialogueWorld`) hands out requests; whatever drives it (a language model, a
search index, a sandbox, a person, a file of recorded answers) gives one reply a request. A request is a value: equal
requests have equal hashes on every machine, so that replies can be cached, recorded and replayed by `request_hash`.
"""

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

ROLES = ("system", "user", "assistant", "tool")
KINDS = ("chat", "search", "run", "lean", "fetch", "human")


@dataclasses.dataclass(frozen=True)
class Text:
    """A text part of a message."""

    text: str


@dataclasses.dataclass(frozen=True)
class Image:
    """A picture part of a message: the encoded file's bytes and their media type."""

    data: bytes
    media_type: str = "image/png"


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    `content` is a string, or a tuple of `Text` and `Image` parts (a list is turned into a tuple). `open=True` marks an
    assistant turn that the model goes on writing (a forced prefix, or text put inside an answer); a back end that
    cannot continue a turn must refuse it.

    Raises:
        ValueError: an unknown role, a content part of another type, or an open turn that is not the assistant's.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str | tuple[Text | Image, ...]
    open: bool = False

    def __post_init__(self):
        if self.role not in ROLES:
            raise ValueError(f"role is {self.role!r}, wanted one of {', '.join(ROLES)}.")
        if not isinstance(self.content, str):
            object.__setattr__(self, "content", tuple(self.content))
            for part in self.content:
                if not isinstance(part, Text | Image):
                    raise ValueError(f"content holds a {type(part).__name__}, wanted a string or Text and Image parts.")
        if self.open and self.role != "assistant":
            raise ValueError(f"open is set on a {self.role} message, wanted an assistant message.")

    @property
    def text(self) -> str:
        """The text parts, joined by line breaks; pictures are left out."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content if isinstance(part, Text))


@dataclasses.dataclass(frozen=True)
class Request:
    """Something a world needs from outside.

    `payload` maps names to JSON values, `Message`s, `Text`, `Image`, bytes, or lists and tuples of them. By kind it
    holds at least:

    - chat: `messages` (tuple of Message); options such as `model` (the role that answers: "agent", "judge"),
      `max_tokens`, `temperature`, `stop`, `top` (log-probabilities of that many alternatives a token), `seed`
    - search: `query`, `k`
    - run: `argv`, `files`, `stdin`
    - lean: `code`, `timeout`
    - fetch: `url`
    - human: `question`

    Raises:
        ValueError: an unknown kind, or a payload that is not a mapping with string keys.
    """

    kind: Literal["chat", "search", "run", "lean", "fetch", "human"]
    payload: Mapping[str, Any]

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}, wanted one of {', '.join(KINDS)}.")
        if not isinstance(self.payload, Mapping) or not all(isinstance(name, str) for name in self.payload):
            raise ValueError(f"payload is a {type(self.payload).__name__}, wanted a mapping with string keys.")

    def __hash__(self) -> int:
        return int(request_hash(self)[:15], 16)


@dataclasses.dataclass(frozen=True)
class Reply:
    """The answer to one request.

    Attributes:
        text: what was written, found or printed.
        tokens: the ids of the written tokens, where the back end knows them.
        logp: natural-log probability of each written token.
        top: for each written token, the best alternatives as (token text, log-probability) pairs, most probable first.
        usage: counts by name ("prompt_tokens", "completion_tokens", "seconds", …).
        error: None, or one sentence saying why there is no answer.
    """

    text: str = ""
    tokens: tuple[int, ...] | None = None
    logp: tuple[float, ...] | None = None
    top: tuple[tuple[tuple[str, float], ...], ...] | None = None
    usage: Mapping[str, float] | None = None
    error: str | None = None


def chat(messages: Sequence[Message], **options: Any) -> Request:
    """A chat request for `messages`, with options as in `Request`; options that are None are left out."""
    return Request("chat", {"messages": tuple(messages)} | {name: v for name, v in options.items() if v is not None})


def to_json(value: Any) -> Any:
    """`value` in JSON types: messages and parts become objects with a `type`, bytes become base64, tuples become lists.

    Raises:
        ValueError: a value that has no JSON form.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Request):
        return {"kind": value.kind, "payload": to_json(value.payload)}
    if isinstance(value, Message):
        return {"type": "message", "role": value.role, "content": to_json(value.content), "open": value.open}
    if isinstance(value, Text):
        return {"type": "text", "text": value.text}
    if isinstance(value, Image):
        return {"type": "image", "media_type": value.media_type, "data": base64.b64encode(value.data).decode("ascii")}
    if isinstance(value, bytes):
        return {"type": "bytes", "data": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Mapping):
        return {name: to_json(value[name]) for name in value}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    raise ValueError(f"a request holds a {type(value).__name__}, wanted JSON values, bytes, messages or lists of them.")


def request_hash(request: Request) -> str:
    """SHA-256 (hex) of the request's canonical JSON: sorted keys, no blanks, UTF-8. The same on every machine and in
    every run.
    """
    canonical = json.dumps(to_json(request), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()
