import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.rendering.core import clone_split as cs
from papyrax.methods.rendering.core import mcmc

pytestmark = [pytest.mark.proof("universal_beta_splatting", "core"), pytest.mark.proof("geer", "core")]
logit = jax.scipy.special.logit


def test_copies_together_are_as_opaque_as_their_source():
    with jax.enable_x64():
        o = jnp.asarray([0.02, 0.3, 0.9, 0.999], jnp.float64)
        for n in (1, 3, 10):
            share = mcmc.split_opacity(o, jnp.full(4, float(n)), 0.0)
            np.testing.assert_allclose(1 - (1 - share) ** (n + 1), o, atol=1e-6)
    assert mcmc.split_opacity(jnp.float32(1.0), jnp.float32(0), 0.005) < 1


def population():
    opacity = jnp.concatenate([jnp.full(20, 0.5), jnp.full(10, 0.001), jnp.full(70, 0.5)])
    params = {"opacity_raw": logit(opacity), "xyz": jnp.arange(100.0)[:, None] * jnp.ones(3)}
    alive = jnp.arange(100) < 30
    moments = {"mu": {k: jnp.ones_like(v) for k, v in params.items()}, "count": jnp.asarray(3)}
    return params, alive, moments


def test_an_event_relocates_the_dead_and_grows_at_fixed_shapes():
    params, alive, moments = population()
    cfg = mcmc.McmcConfig(grow=200)
    event = jax.jit(lambda k, p, a, m: mcmc.mcmc_densify(k, p, a, m, cfg))
    new, grown, cleared = event(jax.random.key(0), params, alive, moments)
    assert grown.sum() == 36 and (grown[:36]).all()
    place = np.asarray(new["xyz"][:, 0])
    assert (place[20:36] < 20).all() and (place[:20] == np.arange(20)).all()
    opacity = np.asarray(jax.nn.sigmoid(new["opacity_raw"]))
    assert (opacity[:36] >= 0.005).all()
    for source in range(20):  # light let through by each family is that of its source before
        family = (place == source) & np.asarray(grown)
        np.testing.assert_allclose(1 - np.prod(1 - opacity[family]), 0.5, atol=1e-4)
    sources = np.unique(place[20:36]).astype(int)
    assert (cleared["mu"]["xyz"][sources] == 0).all() and cleared["count"] == 3
    assert (cleared["mu"]["xyz"][30:36] == 0).all() and (cleared["mu"]["xyz"][40:] == 1).all()
    np.testing.assert_array_equal(new["xyz"][36:], params["xyz"][36:])


def test_sources_are_drawn_by_opacity_and_capacity_is_kept():
    params, alive, moments = population()
    raw = params["opacity_raw"].at[0].set(logit(0.95)).at[1:20].set(logit(0.006))
    count = 0
    event = jax.jit(lambda k, p: mcmc.mcmc_densify(k, p, alive, moments, mcmc.McmcConfig(grow=0))[0])
    for seed in range(20):
        count += (event(jax.random.key(seed), params | {"opacity_raw": raw})["xyz"][20:30, 0] == 0).sum()
    assert 150 < count < 198  # 0.95 of 1.064 on 200 draws: 178.6 +- 4.4
    full = jnp.ones(100, bool)
    _, grown, _ = mcmc.mcmc_densify(jax.random.key(1), params, full, moments, mcmc.McmcConfig(grow=500))
    assert grown.all()
    hopeless = params | {"opacity_raw": jnp.full(100, -jnp.inf)}
    new, grown, _ = mcmc.mcmc_densify(jax.random.key(1), hopeless, alive, moments, mcmc.McmcConfig())
    np.testing.assert_array_equal(new["xyz"], params["xyz"])
    np.testing.assert_array_equal(grown, alive)


def test_noise_moves_the_faint_along_their_shape():
    cov = jnp.broadcast_to(jnp.diag(jnp.asarray([1.0, 0.0, 0.0])), (500, 3, 3))
    opacity = jnp.where(jnp.arange(500) < 250, 0.0, 0.9)
    moved = mcmc.exploration_noise(jax.random.key(0), jnp.zeros((500, 3)), cov, opacity, 2.0)
    assert (
        jnp.abs(moved[:250, 0].std() - 2.0) < 0.3 and (moved[:, 1:] == 0).all() and jnp.abs(moved[250:]).max() < 1e-30
    )
    due = [int(s) for s in range(0, 1200) if mcmc.due(jnp.asarray(s), mcmc.McmcConfig(stop=1000))]
    assert due == [600, 700, 800, 900]


def test_clone_split_prune_reset():
    p = 12
    params = {
        "xyz": jnp.zeros((p, 3)),
        "log_scale": jnp.log(jnp.full((p, 3), 0.005)).at[1].set(jnp.log(0.05)),
        "quat": jnp.tile(jnp.asarray([[1.0, 0, 0, 0]]), (p, 1)),
        "opacity_raw": logit(jnp.full(p, 0.5)).at[2].set(logit(0.001)),
    }
    alive = jnp.arange(p) < 6
    stats = cs.empty_statistics(p)
    value = jnp.zeros(p).at[0].set(1.0).at[1].set(1.0)
    stats = cs.add_view(stats, value, jnp.ones(p, jnp.int32).at[5].set(0))
    assert stats.views[5] == 0
    cfg = cs.CloneSplitConfig()
    moments = {"mu": {k: jnp.ones_like(v) for k, v in params.items()}}
    event = jax.jit(lambda a, p: cs.clone_split(jax.random.key(0), p, a, moments, stats, jnp.asarray(600), cfg))
    new, grown, cleared, lost = event(alive, params)
    assert lost == 0 and grown.sum() == 7 and not grown[2]  # one clone, one split, one pruned
    np.testing.assert_allclose(jnp.exp(new["log_scale"][jnp.asarray([1, 7])]), 0.05 / 1.6, rtol=1e-5)
    np.testing.assert_allclose(new["log_scale"][6], params["log_scale"][0])
    assert jnp.abs(new["xyz"][1] - new["xyz"][7]).max() > 0 and (new["xyz"][6] == 0).all()
    assert (cleared["mu"]["xyz"][jnp.asarray([1, 6, 7])] == 0).all() and (cleared["mu"]["xyz"][0] == 1).all()
    _, _, _, lost = event(jnp.ones(p, bool).at[11].set(False), params)
    assert lost == 1
    low = jax.nn.sigmoid(cs.reset_opacity(params, cfg)["opacity_raw"])
    np.testing.assert_allclose(low[0], 0.01, rtol=1e-5)
    np.testing.assert_allclose(low[2], 0.001, rtol=1e-5)
