"""Optimisers by configuration: schedules, decay mask, accumulation, averages, precision."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from papyrax.train.optim import BF16, OptimConfig, ema_params, learner, make_optimizer, make_schedule, params_ema


def test_schedules_hit_their_marks():
    cosine = make_schedule(
        OptimConfig(schedule="cosine", learning_rate=1.0, warmup_steps=10, total_steps=110, final_fraction=0.1)
    )
    np.testing.assert_allclose(
        [cosine(0), cosine(5), cosine(10), cosine(60), cosine(110)], [0, 0.5, 1, 0.55, 0.1], atol=1e-6
    )
    linear = make_schedule(OptimConfig(schedule="linear", learning_rate=2.0, total_steps=100))
    np.testing.assert_allclose([linear(0), linear(50), linear(100)], [2, 1, 0], atol=1e-6)
    flat = make_schedule(
        OptimConfig(schedule="trapezoid", learning_rate=1.0, warmup_steps=10, total_steps=110, decay_fraction=0.2)
    )
    np.testing.assert_allclose([flat(5), flat(50), flat(90), flat(100), flat(110)], [0.5, 1, 1, 0.5, 0], atol=1e-6)


def test_a_schedule_without_an_end_is_refused():
    with pytest.raises(ValueError, match="total_steps is 0; the cosine schedule wants more than the 0 warm-up steps"):
        make_schedule(OptimConfig(schedule="cosine"))
    with pytest.raises(ValueError, match="'adamx'; wanted one of"):
        make_optimizer(OptimConfig(name="adamx"))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "lion", "adafactor"])
def test_every_optimiser_descends(name):
    optimizer = make_optimizer(OptimConfig(name=name, learning_rate=0.02, clip_norm=1.0))
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    state = optimizer.init(params)

    def loss(p):
        return jnp.sum(p["w"] ** 2) + jnp.sum(p["b"] ** 2)

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), loss(params)

    _, losses = jax.lax.scan(step, (params, state), length=50)
    assert losses[-1] < losses[0] * 0.9


def test_decay_spares_vectors_and_other_paths():
    optimizer = make_optimizer(OptimConfig(learning_rate=0.1, weight_decay=0.5, decay_pattern="^a/"))
    params = {"a": {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}, "c": {"w": jnp.ones((2, 2))}}
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    np.testing.assert_allclose(updates["a"]["w"], -0.05)
    assert not updates["a"]["b"].any() and not updates["c"]["w"].any()


def test_accumulation_equals_one_large_batch():
    grads = [{"w": jnp.asarray([1.0, -2.0])}, {"w": jnp.asarray([3.0, 4.0])}]
    params = {"w": jnp.zeros(2)}
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *grads)
    one = make_optimizer(OptimConfig(name="adam"))
    two = make_optimizer(OptimConfig(name="adam", accumulate=2))
    wanted, _ = one.update(mean, one.init(params), params)
    state = two.init(params)
    first, state = two.update(grads[0], state, params)
    second, state = two.update(grads[1], state, params)
    assert not first["w"].any()
    np.testing.assert_allclose(second["w"], wanted["w"], rtol=1e-6)


def test_the_average_is_unbiased():
    transform = params_ema(0.9)
    params, state, history = jnp.zeros(()), transform.init(jnp.zeros(())), []
    for i in range(5):
        _, state = transform.update(jnp.asarray(float(i)), state, params)
        params = params + i
        history.append(float(params))
    weights = np.asarray([0.1 * 0.9 ** (4 - i) for i in range(5)])
    np.testing.assert_allclose(ema_params((state,), 0.9), (weights @ history) / weights.sum(), rtol=1e-6)
    with pytest.raises(ValueError, match="ema_decay above 0"):
        ema_params(optax.adam(1.0).init(params), 0.9)


def test_learner_computes_low_and_keeps_high():
    seen = []

    def loss(params, batch, key, config, frozen):
        seen.append((params["w"].dtype, batch.dtype))
        return jnp.mean((batch @ params["w"]) ** 2), {"n": jnp.float32(1)}

    init, update = learner(loss, make_optimizer(OptimConfig(learning_rate=0.1)), BF16)
    state = init(jax.random.key(0), {"w": jnp.ones((3, 2), jnp.bfloat16)})
    assert state.params["w"].dtype == jnp.float32
    new, metrics = jax.jit(lambda s, b: update(s, b, None))(state, jnp.ones((4, 3)))
    assert seen == [(jnp.bfloat16, jnp.bfloat16)] and new.params["w"].dtype == jnp.float32
    assert set(metrics) == {"loss", "grad_norm", "n"} and int(new.step) == 1
