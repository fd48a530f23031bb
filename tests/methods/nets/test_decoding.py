"""Sampling rules, generation, beams and scores."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.nets.decoder.cache import init_cache
from papyrax.methods.nets.decoder.config import nano
from papyrax.methods.nets.decoder.model import forward
from papyrax.methods.nets.decoder.params import init
from papyrax.methods.nets.decoding import (
    Rule,
    SamplerConfig,
    Until,
    _generate,
    beam,
    bucket,
    choice_logp,
    filter_logits,
    generate,
    pad_prompts,
    perplexity,
    sample,
    score,
)

CFG = nano()
PARAMS = init(jax.random.key(3), CFG, std=0.3)
PROMPTS = [[5, 9, 200, 31], [7, 7, 12, 90, 41, 3, 250], [256]]
KEY = jax.random.key(0)
jit_forward = jax.jit(forward, static_argnums=1)


def logits_after(ids):
    padded = jnp.asarray([[*ids, *[0] * (24 - len(ids))]])
    return jit_forward(PARAMS, CFG, padded, mask=jnp.arange(24)[None] < len(ids))[0][0, len(ids) - 1]


def test_filters():
    z = jnp.log(jnp.asarray([[0.4, 0.3, 0.2, 0.1], [0.1, 0.4, 0.4, 0.1]]))
    kept = lambda **k: (filter_logits(z, SamplerConfig(1.0, **k)) > -1e29).astype(int).tolist()  # noqa: E731
    assert kept(top_k=2) == [[1, 1, 0, 0], [0, 1, 1, 0]] and kept(top_k=1) == [[1, 0, 0, 0], [0, 1, 0, 0]]
    assert kept(top_p=0.69) == [[1, 1, 0, 0], [0, 1, 1, 0]] and kept(top_p=0.01) == [[1, 0, 0, 0], [0, 1, 0, 0]]
    assert kept(min_p=0.6) == [[1, 1, 0, 0], [0, 1, 1, 0]]
    seen = jnp.asarray([[True, False, False, False]] * 2)
    np.testing.assert_allclose(filter_logits(z, SamplerConfig(repetition=2.0), seen)[:, 0], z[:, 0] * 2)
    np.testing.assert_allclose(filter_logits(-z, SamplerConfig(repetition=2.0), seen)[:, 0], -z[:, 0] / 2)
    assert sample(KEY, z, SamplerConfig()).tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\]"):
        SamplerConfig(top_p=0.0)


def test_samples_follow_their_distribution():
    z = jnp.tile(jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05]])), (4000, 1))
    counts = np.bincount(np.asarray(sample(KEY, z, SamplerConfig(0.5))), minlength=4) / 4000
    want = np.asarray([0.25, 0.09, 0.0225, 0.0025])
    np.testing.assert_allclose(counts, want / want.sum(), atol=0.03)
    assert set(np.asarray(sample(KEY, z, SamplerConfig(1.0, top_k=2)))) == {0, 1}


def test_greedy_generation_equals_rereading_the_text_and_stops():
    ids, seg = pad_prompts(PROMPTS, length=8)
    gen = generate(PARAMS, CFG, KEY, init_cache(CFG, 3, 24), ids, seg=seg, max_new=6, top=2)
    for row, prompt in enumerate(PROMPTS):
        text = list(prompt)
        for i in range(6):
            z = logits_after(text)
            token = int(jnp.argmax(z))
            assert int(gen.tokens[row, i]) == token
            np.testing.assert_allclose(gen.logp[row, i], jax.nn.log_softmax(z)[token], atol=1e-4)
            assert int(gen.top.ids[row, i, 0]) == token
            text.append(token)
    assert gen.length.tolist() == [6, 6, 6] and gen.cache.fill.tolist() == [4 + 5, 7 + 5, 1 + 5]
    stop = (int(gen.tokens[1, 2]),)
    ended = generate(PARAMS, CFG, KEY, init_cache(CFG, 3, 24), ids, seg=seg, max_new=6, stop=stop, top=2)
    first = list(np.asarray(gen.tokens[1])).index(stop[0])
    assert (
        int(ended.length[1]) == first + 1
        and bool(ended.stopped[1])
        and set(np.asarray(ended.tokens[1, first + 1 :])) <= {-1}
    )
    # Going on from the cache: the last token first.
    more = generate(PARAMS, CFG, KEY, gen.cache, gen.tokens[:, -1:], max_new=2)
    longer = generate(PARAMS, CFG, KEY, init_cache(CFG, 3, 24), ids, seg=seg, max_new=8)
    np.testing.assert_array_equal(longer.tokens[:, 6:], more.tokens)


def test_one_compilation_a_bucket_and_rows_do_not_know_their_batch():
    sampler = SamplerConfig(1.0, top_k=50, top_p=0.9, repetition=1.2)
    before = _generate._cache_size()

    def write(prompts):
        ids, seg = pad_prompts(prompts, length=8)
        return generate(PARAMS, CFG, KEY, init_cache(CFG, 2, 24), ids, seg=seg, max_new=5, sampler=sampler).tokens

    a, b = write([PROMPTS[0], PROMPTS[1]]), write([PROMPTS[0], PROMPTS[2]])
    assert _generate._cache_size() == before + 1
    np.testing.assert_array_equal(a[0], b[0])
    assert [bucket(n) for n in (1, 32, 33, 49, 65, 97, 130)] == [32, 32, 48, 64, 96, 128, 192]


def allowed(state):
    return jnp.arange(CFG.vocab)[None, :] % 2 == state[:, None] % 2


def test_rules_and_overflow():
    rule = Rule(jnp.zeros(1, jnp.int32), lambda state, token: state + 1, allowed)
    gen = generate(PARAMS, CFG, KEY, init_cache(CFG, 1, 16), jnp.asarray([[4, 5]]), max_new=4, rule=rule)
    assert (np.asarray(gen.tokens[0]) % 2).tolist() == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="holds 6 tokens a sequence, but prompt and max_new need 7"):
        generate(PARAMS, CFG, KEY, init_cache(CFG, 1, 6), jnp.asarray([[4, 5]]), max_new=6)
    with pytest.raises(ValueError, match="at least one token in each"):
        pad_prompts([[1], []])


def test_beam_finds_the_best_sequence():
    v, n = 4, 3
    table = jnp.asarray(np.random.default_rng(0).normal(size=(n, v + 1, v)) * 2)  # logits by time and last token

    def step(state, token):
        return table[state["time"][0] + 1, token], {"time": state["time"] + 1}

    first = table[0, v]
    search = jax.jit(
        lambda width, until: beam(step, first, {"time": jnp.zeros(1, jnp.int32)}, width, until), static_argnums=(0, 1)
    )
    found = search(4, Until((), n))

    logp = np.asarray(jax.nn.log_softmax(table, axis=-1))

    def total(seq):
        return float(logp[0, v, seq[0]] + sum(logp[t, seq[t - 1], seq[t]] for t in range(1, n)))

    best = max(itertools.product(range(v), repeat=n), key=total)
    np.testing.assert_array_equal(found.tokens[0], best)
    assert float(found.logp[0]) == pytest.approx(total(best), abs=1e-4) and bool(
        jnp.all(found.logp[:-1] >= found.logp[1:])
    )
    ended = search(2, Until((0, 1, 2, 3), n))
    assert ended.length.tolist() == [1, 1] and int(ended.tokens[0, 0]) == int(jnp.argmax(first))


def test_scores():
    ids, seg = pad_prompts(PROMPTS[:2], length=8)
    mask = jnp.asarray(seg) >= 0
    got = jax.jit(score, static_argnums=1)(PARAMS, CFG, jnp.asarray(ids), mask)
    for row, prompt in enumerate(PROMPTS[:2]):
        want = [0.0] + [float(jax.nn.log_softmax(logits_after(prompt[:i]))[prompt[i]]) for i in range(1, len(prompt))]
        np.testing.assert_allclose(got[row, 8 - len(prompt) :], want, atol=1e-4)
        assert float(jnp.max(jnp.abs(got[row, : 8 - len(prompt)]))) == 0.0 if len(prompt) < 8 else True
    picked = jax.jit(choice_logp, static_argnums=1)(PARAMS, CFG, jnp.asarray(ids), jnp.asarray([3, 100]), mask=mask)
    np.testing.assert_allclose(
        picked[0], jax.nn.log_softmax(logits_after(PROMPTS[0]))[jnp.asarray([3, 100])], atol=1e-4
    )
    assert float(perplexity(jnp.log(jnp.asarray([[0.5, 0.1]])), jnp.asarray([[True, False]]))) == pytest.approx(2.0)
