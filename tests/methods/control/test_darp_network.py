"""Features, the per-neighbour network and its fast forms, the set transformer, the heads; against plain numpy forwards."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from papyrax.methods.control.darp import heads, learner, network, policy, set_transformer
from papyrax.methods.control.darp.config import Config
from papyrax.methods.control.darp.demos import fit_scalers, make_demos, positions
from papyrax.methods.control.darp.features import expert_products, feature_size, features, gather_add
from tests.support.params import drawn

pytestmark = pytest.mark.proof("darp", "proof")
O, A, N, B, K = 5, 2, 30, 4, 7
CFG = Config(width=16, depth=3, k=K, lookback=2, ratio=1.0)


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    obs, act = (rng.normal(1, 3, size=(N, d)).astype(np.float32) for d in (O, A))
    obs[:, 3] = 2.5  # a dimension that never varies
    demos = make_demos(obs, act, np.array([0, 12]))
    idx = jnp.asarray(rng.integers(0, N, (B, K)), jnp.int32)
    query = jnp.asarray(rng.normal(1, 3, size=(B, O)).astype(np.float32))
    return demos, fit_scalers(demos), idx, query


def test_scalers_round_trip_and_follow_both_conventions(case):
    demos, scalers, _, _ = case
    obs, act = np.asarray(demos.obs, np.float64), np.asarray(demos.act, np.float64)
    vary = [0, 1, 2, 4]
    np.testing.assert_allclose(np.asarray(scalers.obs_std)[vary], obs.std(0, ddof=1)[vary], rtol=1e-5)
    np.testing.assert_allclose(scalers.act_std, act.std(0), rtol=1e-5)
    np.testing.assert_allclose(fit_scalers(demos, 0, 1).obs_std[:3], obs.std(0)[:3], rtol=1e-5)
    assert float(scalers.obs_std[3]) == 1.0
    np.testing.assert_allclose(scalers.raw_act(scalers.act(demos.act)), demos.act, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(positions(demos.start, N), [*range(12), *range(18)])


@functools.partial(jax.jit, static_argnums=4)
def both(demos, scalers, idx, query, cfg):
    """Features, and a first layer on them in factored and in direct form."""
    x = features(demos, scalers, idx, query, cfg)
    w, b = jnp.sin(jnp.arange(6.0 * x.shape[-1])).reshape(-1, 6), jnp.arange(6.0)
    return x, gather_add(expert_products(w, b, demos, scalers, cfg), w, demos, scalers, idx, query, cfg), x @ w + b


def test_features_have_the_papers_scales(case):
    demos, scalers, idx, query = case
    z = (np.asarray(demos.obs) - np.asarray(scalers.obs_mean)) / np.asarray(scalers.obs_std)
    zq = (np.asarray(query) - np.asarray(scalers.obs_mean)) / np.asarray(scalers.obs_std)
    u = np.asarray(scalers.act(demos.act))
    zi, ui, delta = z[idx], u[idx], z[idx] - zq[:, None]
    for change, parts in (
        ({}, (zi, ui, delta / math.sqrt(2))),
        ({"neighbour_action": False}, (zi, delta / math.sqrt(2))),
        ({"difference": "query"}, (zi, ui, np.broadcast_to(zq[:, None], zi.shape))),
        ({"difference": "norm"}, (zi, ui, np.linalg.norm(delta, axis=-1, keepdims=True) / math.sqrt(2))),
    ):
        cfg = dataclasses.replace(CFG, **change)
        got, factored, direct = both(demos, scalers, idx, query, cfg)
        assert got.shape == (B, K, feature_size(O, A, cfg))
        np.testing.assert_allclose(got, np.concatenate(parts, -1), atol=2e-6, err_msg=str(change))
        np.testing.assert_allclose(factored, direct, atol=1e-5, err_msg=str(change))
    assert feature_size(O, A, CFG) == 2 * O + A


def numpy_mlp(layers, x):
    x = np.asarray(x, np.float64)
    for layer in layers[:-1]:
        y = x @ np.asarray(layer["w"], np.float64) + np.asarray(layer["b"])
        y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
        x = np.maximum(y * np.asarray(layer["scale"]) + np.asarray(layer["bias"]), 0)
    return x @ np.asarray(layers[-1]["w"], np.float64) + np.asarray(layers[-1]["b"])


def policy_params(cfg=CFG):
    """Parameters away from their special initial values (scale 1, bias 0)."""
    return drawn(lambda: network.init(jax.random.key(0), O, A, cfg, neighbours=K))


def test_mean_policy_is_the_plain_network_averaged(case):
    """Independent forward: every neighbour through Linear, LayerNorm, ReLU, Linear, then the mean over neighbours."""
    demos, scalers, idx, query = case
    params = policy_params()
    feats = features(demos, scalers, idx, query, CFG)
    want = numpy_mlp(params["f"], feats).mean(1)
    np.testing.assert_allclose(jax.jit(network.apply, static_argnums=2)(params, feats, CFG), want, atol=1e-5)
    by_table = jax.jit(
        lambda p: network.apply_table(p, network.expert_table(p, demos, scalers, CFG), demos, scalers, idx, query, CFG)
    )
    np.testing.assert_allclose(by_table(params), want, atol=1e-5)


@pytest.mark.parametrize("product", [0, 64])
def test_factored_first_layer_has_the_same_gradients(case, product, monkeypatch):
    """Both backward forms (scatter and product) against autodiff of the plain network; a loss with a kink-free output."""
    monkeypatch.setattr(network, "_PRODUCT", product)
    demos, scalers, idx, query = case
    params = policy_params()
    feats = features(demos, scalers, idx, query, CFG)

    def plain(params):
        def norm(layer, y):
            y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-5)
            return jax.nn.relu(y * layer["scale"] + layer["bias"])

        h = feats
        for layer in params["f"][:-1]:
            h = norm(layer, h @ layer["w"] + layer["b"])
        last = params["f"][-1]
        return jnp.sum(jnp.sin((h @ last["w"] + last["b"]).mean(1)))

    def fast(params):
        return jnp.sum(jnp.sin(network.apply_factored(params, demos, scalers, idx, query, CFG)))

    (a, ga), (b, gb) = jax.jit(lambda p: (jax.value_and_grad(plain)(p), jax.value_and_grad(fast)(p)))(params)
    np.testing.assert_allclose(a, b, atol=1e-5)
    for want, got in zip(jax.tree.leaves(ga), jax.tree.leaves(gb)):
        np.testing.assert_allclose(got, want, atol=2e-5, rtol=1e-4)


def numpy_mab(p, q, k, heads):
    def linear(name, x):
        return x @ np.asarray(p[name]["w"], np.float64) + np.asarray(p[name]["b"])

    qq, kk, vv = linear("q", q), linear("k", k), linear("v", k)
    dim = qq.shape[-1]
    parts = []
    for h in range(heads):
        s = slice(h * dim // heads, (h + 1) * dim // heads)
        score = qq[:, s] @ kk[:, s].T / math.sqrt(dim)
        weight = np.exp(score - score.max(-1, keepdims=True))
        parts.append(qq[:, s] + weight / weight.sum(-1, keepdims=True) @ vv[:, s])
    out = np.concatenate(parts, -1)
    return out + np.maximum(linear("o", out), 0)


def test_set_transformer_against_numpy_and_any_order():
    init = functools.partial(set_transformer.init, n_in=3, n_out=5, dim=12, inducing=4)
    params = drawn(lambda: init(jax.random.key(0)))
    x = np.random.default_rng(1).normal(size=(2, 9, 3)).astype(np.float32)
    got = jax.jit(set_transformer.apply, static_argnums=2)(params, x, 3)
    for row, want in zip(got, x):
        h = np.asarray(want, np.float64)
        for p in params["encode"]:
            h = numpy_mab(p["out"], h, numpy_mab(p["in"], np.asarray(p["points"], np.float64), h, 3), 3)
        h = numpy_mab(params["pool"], np.asarray(params["seed"], np.float64), h, 3)
        for p in params["decode"]:
            h = numpy_mab(p, h, h, 3)
        np.testing.assert_allclose(
            row, (h @ np.asarray(params["last"]["w"]) + np.asarray(params["last"]["b"]))[0], atol=2e-5
        )
    order = np.random.default_rng(2).permutation(9)
    np.testing.assert_allclose(jax.jit(set_transformer.apply, static_argnums=2)(params, x[:, order], 3), got, atol=1e-5)
    bound = math.sqrt(6 / (12 * 5))
    points = jax.jit(lambda key: init(key)["encode"][0]["points"])(jax.random.key(3))
    assert 0.8 * bound < float(jnp.abs(points).max()) <= bound
    with pytest.raises(ValueError, match="heads must divide"):
        set_transformer.apply(params, jnp.asarray(x), 5)


@pytest.mark.parametrize(("aggregator", "moves"), [("mean", False), ("set", False), ("ordered", True)])
def test_order_of_neighbours(case, aggregator, moves):
    demos, scalers, idx, query = case
    cfg = dataclasses.replace(CFG, aggregator=aggregator, set_dim=8, set_heads=2, set_inducing=3)
    params = policy_params(cfg)
    feats = features(demos, scalers, idx, query, cfg)
    apply = jax.jit(network.apply, static_argnums=2)
    change = float(jnp.abs(apply(params, feats, cfg) - apply(params, feats[:, ::-1], cfg)).max())
    assert change > 1e-3 if moves else change < {"mean": 1e-6, "set": 1e-5}[aggregator]


def test_mixture_head_against_scipy():
    m, a = 3, 2
    rng = np.random.default_rng(0)
    out, u = (jnp.asarray(rng.normal(size=(4, n)), jnp.float32) for n in (m * (2 * a + 1), a))
    mix = heads.mixture(out, m)
    weight = np.asarray(jax.nn.softmax(mix.logits))
    density = sum(weight[:, i] * scipy.stats.norm.pdf(u, mix.mean[:, i], mix.scale[:, i]).prod(-1) for i in range(m))
    np.testing.assert_allclose(jax.jit(heads.mixture_log_prob)(mix, u), np.log(density), atol=1e-5)
    assert float(mix.scale.min()) > 0.01
    draw = jax.jit(jax.vmap(lambda k: heads.mixture_sample(k, mix)))
    draws = draw(jax.random.split(jax.random.key(2), 4000))
    np.testing.assert_allclose(draws.mean(0), np.einsum("bm,bma->ba", weight, mix.mean), atol=0.12)
    cfg = Config(head="gmm", modes=m)
    far = jax.jit(jax.grad(lambda o: heads.row_loss(o, u + 1e3, cfg).sum()))(out)
    assert bool(jnp.isfinite(far).all())
    with pytest.raises(ValueError, match="needs a key"):
        heads.action(None, out, cfg)
    with pytest.raises(ValueError, match="3 modes need"):
        heads.mixture(out[:, :-1], m)


@pytest.mark.proof("darp", "core")
def test_mixture_beats_the_mean_head_on_a_fork():
    """Half of the expert rows go left, half go right, at the same states: the mean is an action nobody took."""
    n = 200
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(n, 2)).astype(np.float32)
    side = np.where(np.arange(n) % 2 == 0, 1.0, -1.0)
    act = (side + 0.05 * rng.normal(size=n)).astype(np.float32)[:, None]
    demos = make_demos(obs, act, np.array([0]))
    wrong = {}
    small = Config(width=16, depth=1, k=8, lookback=1, ratio=1.0, modes=2, learning_rate=1e-2, weight_decay=0.0)
    for head, aggregator in (("point", "mean"), ("gmm", "mean"), ("gmm", "set")):
        cfg = dataclasses.replace(small, head=head, aggregator=aggregator, set_dim=8, set_heads=2, set_inducing=3)
        memory = learner.prepare(demos, cfg)
        params = drawn(lambda cfg=cfg: network.init(jax.random.key(0), 2, 1, cfg))
        state = learner.fresh(jax.random.key(0), params, cfg)
        rows = jnp.asarray(np.stack([learner.batch_rows(0, i, n, 50) for i in range(120)]))
        fit = jax.jit(lambda s, r, m, cfg=cfg: jax.lax.scan(lambda s, b: learner.update(s, b, cfg, frozen=m), s, r))
        state, metrics = fit(state, rows, memory)
        assert np.isfinite(np.asarray(metrics["loss"])).all()
        ready = policy.prepare(state.params, demos, memory.scalers, cfg)
        play = jax.jit(policy.act_ready, static_argnames="cfg")
        played = play(ready, demos.obs[:, None], jnp.ones(n, int), jax.random.key(1), cfg=cfg)
        wrong[head, aggregator] = float(jnp.mean(jnp.abs(jnp.abs(played) - 1) > 0.5))
    assert max(wrong["gmm", "mean"], wrong["gmm", "set"]) < 0.2 < 0.6 < wrong["point", "mean"], wrong


def test_bad_input_is_told():
    params = policy_params()
    with pytest.raises(ValueError, match=r"feats must have shape \(b, K, 12\)"):
        network.apply(params, jnp.zeros((2, 3, 11)), CFG)
    with pytest.raises(ValueError, match="needs the number of neighbours"):
        network.init(jax.random.key(0), O, A, dataclasses.replace(CFG, aggregator="ordered"))
    with pytest.raises(ValueError, match='"point" or "gmm"'):
        heads.head_size(2, dataclasses.replace(CFG, head="softmax"))
