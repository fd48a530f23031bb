"""The model's own tokenizer and chat template, from a GGUF file or a Hugging Face folder.

GGUF names a pre-tokenizer rather than describing it; each name here is the split that the model was trained with. For "smollm" single digits
are split off first: no token joins two digits, and plain byte-level splitting differs where two or more spaces stand before one.
Templates are untrusted programs: they run in jinja2's immutable sandbox.
"""

import dataclasses
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from papyrax.train.pretrained.errors import WeightsError
from papyrax.train.pretrained.gguf import Gguf, open_gguf

__all__ = ["Tokenizer", "from_folder", "from_gguf", "load_tokenizer"]

CONTROL, USER_DEFINED = 3, 4
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back. ``eos`` are all ids that end a reply; ``template`` is the chat template, if the file has one."""

    backend: tokenizers.Tokenizer
    template: str | None
    bos: int | None
    eos: tuple[int, ...]
    pad: int | None
    add_bos: bool = False

    @property
    def vocab(self) -> int:
        return self.backend.get_vocab_size()

    def encode(self, text: str, *, bos: bool | None = None) -> list[int]:
        """Ids of a text; special tokens written out in it are parsed. ``bos`` defaults to what the file says."""
        ids = self.backend.encode(text, add_special_tokens=False).ids
        first = self.add_bos if bos is None else bos
        return [self.bos, *ids] if first and self.bos is not None else ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ids, without special tokens unless asked for."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=not special)

    def id(self, token: str) -> int:
        """The id of one token.

        Raises:
          ValueError: the vocabulary has no such token.
        """
        found = self.backend.token_to_id(token)
        if found is None:
            raise ValueError(f"The vocabulary has no token {token!r}.")
        return found

    def chat(self, messages: Sequence[dict[str, str]], *, reply: bool = True) -> str:
        """A conversation as the text that the model was trained on; encode it with ``bos=False``.

        With ``reply`` the text ends where the assistant begins to speak. If the last message is the assistant's own, it is left open instead
        and the model goes on writing it.

        Raises:
          ValueError: there is no template, no message, or the template refuses the messages.
        """
        if self.template is None:
            raise ValueError("This tokenizer has no chat template: encode plain text instead.")
        if not messages:
            raise ValueError("chat wants at least one message, but got none.")
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )

        def refuse(message):
            raise jinja2.TemplateError(message)

        env.globals["raise_exception"] = refuse
        env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        env.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
        unfinished = reply and messages[-1]["role"] == "assistant"
        names = {"bos_token": self.bos, "eos_token": self.eos[0] if self.eos else None, "pad_token": self.pad}
        tokens = {k: "" if i is None else self.backend.id_to_token(i) for k, i in names.items()}
        try:
            template = env.from_string(self.template)
            text = template.render(messages=list(messages), add_generation_prompt=reply and not unfinished, **tokens)
        except jinja2.TemplateError as error:
            raise ValueError(f"The chat template refuses these messages: {error}.") from None
        if unfinished:
            said = messages[-1]["content"].strip()
            text = text[: text.rindex(said) + len(said)]
        return text


def _pre_tokenizer(name: str, path: Path) -> tuple[Any, Any, bool]:
    """Normaliser, pre-tokenizer and whether whole words skip merging, for the names that GGUF uses."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in ("gpt-2", "default"):
        return None, plain, False
    if name == "smollm":
        return None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain]), False
    if name in ("llama-bpe", "qwen2"):
        words = tokenizers.Regex(WORDS % ("{1,3}" if name == "llama-bpe" else ""))
        split = pre_tokenizers.Split(words, behavior="isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        normal = normalizers.NFC() if name == "qwen2" else None
        return normal, pre_tokenizers.Sequence([split, bytes_only]), name == "llama-bpe"
    raise WeightsError(f"{path} names the pre-tokenizer {name!r}, but gpt-2, smollm, llama-bpe and qwen2 are known.")


def from_gguf(file: Gguf) -> Tokenizer:
    """The tokenizer in a GGUF file's metadata.

    Raises:
      WeightsError: no tokenizer in the file, or one that is not byte-level BPE with a known pre-tokenizer.
    """
    meta = file.meta
    model = meta.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise WeightsError(f"{file.path} has a tokenizer of kind {model!r}, but only byte-level BPE ('gpt2') is read.")
    for key in ("tokens", "merges", "token_type"):
        if f"tokenizer.ggml.{key}" not in meta:
            raise WeightsError(f"{file.path} does not say tokenizer.ggml.{key}.")
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(m.split(" ", 1)) for m in meta["tokenizer.ggml.merges"]]
    normal, pre, whole = _pre_tokenizer(meta.get("tokenizer.ggml.pre", "default"), file.path)
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole))
    except Exception as error:
        raise WeightsError(f"{file.path} has a broken tokenizer: {error}.") from None
    if normal is not None:
        backend.normalizer = normal
    backend.pre_tokenizer, backend.decoder = pre, decoders.ByteLevel()
    added = [(t, int(k)) for t, k in zip(tokens, kinds) if k in (CONTROL, USER_DEFINED)]
    backend.add_special_tokens(
        [tokenizers.AddedToken(t, special=True, normalized=False) for t, k in added if k == CONTROL]
    )
    backend.add_tokens(
        [tokenizers.AddedToken(t, special=False, normalized=False) for t, k in added if k == USER_DEFINED]
    )

    def special(name):
        value = meta.get(f"tokenizer.ggml.{name}_token_id")
        return None if value is None else int(value)

    eos = tuple(dict.fromkeys(i for i in (special("eos"), special("eot")) if i is not None))
    return Tokenizer(
        backend,
        meta.get("tokenizer.chat_template"),
        special("bos"),
        eos,
        special("padding"),
        bool(meta.get("tokenizer.ggml.add_bos_token", False)),
    )


def from_folder(folder: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json, with names of special tokens and the template beside it.

    Raises:
      WeightsError: tokenizer.json is missing or not readable.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise WeightsError(f"{path} does not exist.")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise WeightsError(f"{path} is not a tokenizer: {error}.") from None

    def side(name):
        file = folder / name
        return json.loads(file.read_text()) if file.is_file() else {}

    try:
        said, generation = side("tokenizer_config.json"), side("generation_config.json")
    except json.JSONDecodeError as error:
        raise WeightsError(f"{folder} has a settings file that is not JSON: {error}.") from None

    def special(name):
        token = said.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        return None if token is None else backend.token_to_id(token)

    more = generation.get("eos_token_id", [])
    more = more if isinstance(more, list) else [more]
    eos = tuple(dict.fromkeys(i for i in (special("eos"), *more) if i is not None))
    template = said.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = {t["name"]: t["template"] for t in template}.get("default")
    if template is None and (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text()
    return Tokenizer(backend, template, special("bos"), eos, special("pad"), bool(said.get("add_bos_token", False)))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """From a folder or a GGUF file."""
    return from_folder(path) if Path(path).is_dir() else from_gguf(open_gguf(path))
