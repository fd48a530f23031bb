import numpy as np
import pytest

from papyrax.methods.text.messages import Image, Message, Reply, Request, Text, chat, request_hash


def test_hash_is_stable_and_sees_everything():
    base = chat([Message("user", "héllo")], max_tokens=3)
    # Written down once: a change would orphan every recorded reply.
    assert request_hash(base) == "cded0e5415ab18ce62ff3bff96d8107715e25ff0652decf4ea44d32a1620157e"
    same = Request("chat", {"max_tokens": 3, "messages": [Message("user", "héllo")]})
    assert request_hash(same) == request_hash(base) and hash(same) == hash(base)
    others = [
        chat([Message("user", "héllo")], max_tokens=4),
        chat([Message("system", "héllo")], max_tokens=3),
        chat([Message("user", "héllo"), Message("assistant", "", open=True)], max_tokens=3),
        chat([Message("user", (Text("héllo"),))], max_tokens=3),
        chat([Message("user", (Text("héllo"), Image(b"1")))], max_tokens=3),
        chat([Message("user", (Text("héllo"), Image(b"2")))], max_tokens=3),
        chat([Message("user", (Text("héllo"), Image(b"2", "image/jpeg")))], max_tokens=3),
        Request("search", {"query": "héllo", "k": 3}),
    ]
    assert len({request_hash(request) for request in (base, *others)}) == len(others) + 1


def test_parts():
    message = Message("user", [Text("a"), Image(b"x"), Text("b")])
    assert isinstance(message.content, tuple) and message.text == "a\nb" and hash(message)
    assert Message("user", "plain").text == "plain"
    assert "top_p" not in chat([message], top_p=None).payload
    assert Reply("x") == Reply("x") and Reply().error is None


def test_bad_input_is_told():
    with pytest.raises(ValueError, match="role is 'bot'"):
        Message("bot", "x")
    with pytest.raises(ValueError, match="content holds a int"):
        Message("user", [3])
    with pytest.raises(ValueError, match="open is set on a user"):
        Message("user", "x", open=True)
    with pytest.raises(ValueError, match="kind is 'talk'"):
        Request("talk", {})
    with pytest.raises(ValueError, match="payload is a list"):
        Request("run", ["ls"])
    with pytest.raises(ValueError, match="holds a ndarray"):
        request_hash(Request("search", {"vector": np.zeros(3)}))
    with pytest.raises(ValueError):
        request_hash(Request("search", {"k": float("nan")}))
