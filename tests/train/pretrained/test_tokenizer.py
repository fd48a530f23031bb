"""The tokenizer and chat template of the real file, and small ones made here."""

import json

import pytest
import tokenizers

from papyrax.train.pretrained.errors import WeightsError
from papyrax.train.pretrained.gguf import Gguf, open_gguf
from papyrax.train.pretrained.tokenizer import from_folder, from_gguf, load_tokenizer
from tests.support.smollm2 import smollm2_path

BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def meta(**changes):
    tokens = ["<s>", "</s>", "<|note|>", *BYTES, "12", "Ġ1", "ĠĠ", "th", "the"]
    said = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["1 2", "Ġ 1", "Ġ Ġ", "t h", "th e"],
        "tokenizer.ggml.token_type": [3, 3, 4] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant\n{% endif %}",
    }
    return Gguf("m.gguf", {k: v for k, v in (said | changes).items() if v is not None}, {})


def test_special_tokens_round_trip_and_the_split_by_name():
    tok = from_gguf(meta())
    ids = tok.encode("<s>the 12<|note|></s>")
    assert ids[0] == 0 and ids[-1] == 1 and ids[-2] == 2 and tok.id("the") in ids
    assert tok.decode(ids) == "the 12<|note|>" and tok.decode(ids, special=True) == "<s>the 12<|note|></s>"
    assert tok.encode("a", bos=True)[0] == 0 and tok.eos == (1,)
    assert tok.decode(tok.encode("naïve ½ 日本\n")) == "naïve ½ 日本\n"
    digits = from_gguf(meta(**{"tokenizer.ggml.pre": "smollm"}))
    assert digits.id("12") not in digits.encode("12") and tok.id("12") in tok.encode("12")
    assert digits.encode("a  2")[1] == digits.id("ĠĠ") and tok.encode("a  2")[1] == tok.id("Ġ")
    for name in ("llama-bpe", "qwen2"):
        other = from_gguf(meta(**{"tokenizer.ggml.pre": name}))
        assert other.decode(other.encode("the 12's")) == "the 12's"


def test_chat_and_an_answer_left_open():
    tok = from_gguf(meta())
    said = [{"role": "user", "content": "hi"}]
    assert tok.chat(said) == "<s>user\nhi</s><s>assistant\n"
    assert tok.chat(said, reply=False) == "<s>user\nhi</s>"
    assert tok.chat([*said, {"role": "assistant", "content": "Well,"}]).endswith("<s>assistant\nWell,")
    with pytest.raises(ValueError, match="at least one message"):
        tok.chat([])
    with pytest.raises(ValueError, match="has no chat template"):
        from_gguf(meta(**{"tokenizer.chat_template": None})).chat(said)
    unsafe = from_gguf(
        meta(**{"tokenizer.chat_template": "{{ messages.__class__.__mro__ }}{{ raise_exception('no') }}"})
    )
    with pytest.raises(ValueError, match="refuses these messages"):
        unsafe.chat(said)


def test_unknown_tokenizers_are_refused(tmp_path):
    for changes, message in (
        ({"tokenizer.ggml.pre": "tekken"}, "names the pre-tokenizer 'tekken'"),
        ({"tokenizer.ggml.model": "llama"}, "kind 'llama'"),
        ({"tokenizer.ggml.merges": None}, "does not say tokenizer.ggml.merges"),
    ):
        with pytest.raises(WeightsError, match=message):
            from_gguf(meta(**changes))
    with pytest.raises(WeightsError, match=r"tokenizer\.json does not exist"):
        from_folder(tmp_path)


def test_a_folder_gives_the_same_tokenizer(tmp_path):
    tok = from_gguf(meta())
    tok.backend.save(str(tmp_path / "tokenizer.json"))
    said = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": tok.template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    other = load_tokenizer(tmp_path)
    assert other.encode("<s>the 12") == tok.encode("<s>the 12") and (other.bos, other.eos) == (0, (1, 2))
    assert other.chat([{"role": "user", "content": "hi"}]) == tok.chat([{"role": "user", "content": "hi"}])


def test_smollm2():
    tok = from_gguf(open_gguf(smollm2_path()))
    want = [19556, 905, 28, 216, 33, 34, 35, 357, 506, 216, 4979, 198, 198, 2231]
    assert tok.encode("Hello world, 123 it's  fine\n\nok") == want
    assert tok.backend.encode("on  2").tokens == ["on", "ĠĠ", "2"]
    assert tok.vocab == 49152 and (tok.bos, tok.eos, tok.pad) == (1, (2,), 2)
    text = tok.chat([{"role": "user", "content": "hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tok.encode(text)[0] == 1 and tok.encode(text).count(1) == 3
