"""The decoder against an independent one, its cache, padding, segments, taps and edits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.jaxlib_ext.attention import attention
from papyrax.methods.nets.decoder.cache import fork, init_cache
from papyrax.methods.nets.decoder.config import FAMILIES, Config, nano
from papyrax.methods.nets.decoder.hooks import Edit, Taps, gates
from papyrax.methods.nets.decoder.model import embed, forward, head, places, run
from papyrax.methods.nets.decoder.params import init, stack, unstack
from papyrax.methods.nets.rope import RopeConfig
from tests.support import decoder as independent

IDS = jnp.asarray(np.random.default_rng(0).integers(0, 257, (2, 11)), jnp.int32)


@functools.cache
def model(family="llama", **changes):
    cfg = nano(family, **changes)
    params = init(jax.random.key(1), cfg, std=0.2)
    noise = iter(jax.random.split(jax.random.key(2), 32))
    # Norms and biases away from 1 and 0, so that leaving one out shows.
    layers = {
        k: v + 0.3 * jax.random.normal(next(noise), v.shape) if k.endswith(("_b", "_norm")) else v
        for k, v in params["layers"].items()
    }
    return {**params, "layers": layers}, cfg


jit_forward = jax.jit(forward, static_argnames=("cfg", "causal", "taps", "remat"))
jit_run = jax.jit(run, static_argnames=("cfg", "causal", "layers", "taps", "attend"))


def close(a, b, atol=1e-4):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=atol)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_an_independent_implementation(family):
    params, cfg = model(family)
    ours, taps = jit_forward(params, cfg, IDS)
    assert taps == {} and ours.dtype == jnp.float32
    close(ours[1], independent.logits(params, cfg, IDS[1]))
    assert ("q_b" in params["layers"]) == (family == "qwen2")
    assert ("q_norm" in params["layers"]) == (family == "qwen3") and ("head" in params) == (family == "qwen3")


def test_bidirectional_equals_an_independent_implementation_and_does_not_know_order():
    params, cfg = model()
    pos, _ = places(jnp.ones(IDS.shape, bool))
    x = embed(params, IDS)
    ours = jit_run(params, cfg, x, pos=pos, causal=False).x
    close(head(params, cfg, ours)[0], independent.logits(params, cfg, IDS[0], causal=False))
    order = np.random.default_rng(1).permutation(IDS.shape[1])
    close(jit_run(params, cfg, x[:, order], pos=pos[:, order], causal=False).x, ours[:, order])


def test_scaled_rotary_positions_reach_the_model():
    rope = RopeConfig(16, 10000.0, "yarn", 4.0, 32)
    params, cfg = model(rope=rope)
    close(jit_forward(params, cfg, IDS)[0][0], independent.logits(params, cfg, IDS[0]))


def test_cache_in_chunks_equals_the_whole():
    params, cfg = model("qwen3")
    whole = jit_forward(params, cfg, IDS)[0]
    pos, _ = places(jnp.ones(IDS.shape, bool))
    x = embed(params, IDS)
    cache = init_cache(cfg, 2, 40)
    rows = []
    for a, b in ((0, 5), (5, 10), (10, 11)):
        out = jit_run(params, cfg, x[:, a:b], pos=pos[:, a:b], cache=cache)
        cache = out.cache
        rows.append(out.x)
    close(head(params, cfg, jnp.concatenate(rows, 1)), whole)
    assert cache.fill.tolist() == [11, 11] and not cache.overflow.any()
    # A gather over all slots (many rows) and a scatter (few) write the same cache.
    small = jit_run(params, cfg, x, pos=pos, cache=init_cache(cfg, 2, 12)).cache
    close(small.k[:, :, :, :11], cache.k[:, :, :, :11], 1e-5)
    forked = fork(cache, jnp.asarray([1, 1, 0]))
    np.testing.assert_array_equal(forked.k[:, 1], cache.k[:, 1])
    assert forked.pos.shape == (3, 40)


@pytest.mark.parametrize("left", [True, False])
def test_padding_on_either_side_changes_nothing(left):
    params, cfg = model()
    whole = jit_forward(params, cfg, IDS)[0]
    padded = jnp.pad(IDS, ((0, 0), (5, 0) if left else (0, 5)), constant_values=9)
    mask = jnp.pad(jnp.ones(IDS.shape, bool), ((0, 0), (5, 0) if left else (0, 5)))
    real = slice(5, None) if left else slice(0, 11)
    close(jit_forward(params, cfg, padded, mask=mask)[0][:, real], whole)
    pos, seg = places(mask)
    out = jit_run(params, cfg, embed(params, padded), pos=pos, seg=seg, cache=init_cache(cfg, 2, 20))
    close(head(params, cfg, out.x[:, real]), whole)
    assert out.cache.fill.tolist() == [11, 11] and bool(jnp.all(out.cache.seg[:, 11:] == -1))


def test_packed_documents_do_not_see_each_other():
    params, cfg = model("qwen2")
    pos = jnp.asarray([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]])
    seg = jnp.asarray([[0] * 4 + [1] * 7])
    out = jit_run(params, cfg, embed(params, IDS[:1]), pos=pos, seg=seg)
    got = head(params, cfg, out.x)[0]
    close(got[:4], independent.logits(params, cfg, IDS[0, :4]))
    close(got[4:], independent.logits(params, cfg, IDS[0, 4:]))


def test_layers_may_be_run_in_parts_and_unrolled():
    params, cfg = model()
    pos, _ = places(jnp.ones(IDS.shape, bool))
    x = embed(params, IDS)
    whole = jit_run(params, cfg, x, pos=pos).x
    lower = jit_run(params, cfg, x, pos=pos, layers=(0, 1), cache=init_cache(cfg, 2, 11, layers=1))
    close(jit_run(params, cfg, lower.x, pos=pos, layers=(1, 2)).x, whole, 1e-5)
    flat = unstack(params)
    assert len(flat["layers"]) == 2
    close(jit_run(flat, cfg, x, pos=pos).x, whole, 1e-5)
    jax.tree.map(np.testing.assert_array_equal, stack(flat), params)


def test_window_hides_what_lies_further_back():
    params, cfg = model(window=3)
    changed = IDS.at[:, 0].set((IDS[:, 0] + 1) % 257)
    a, b = jit_forward(params, cfg, IDS)[0], jit_forward(params, cfg, changed)[0]
    # Two layers of window 3 reach 4 positions back.
    assert float(jnp.max(jnp.abs(a[:, 5:] - b[:, 5:]))) == 0.0 and float(jnp.max(jnp.abs(a[:, 4] - b[:, 4]))) > 1e-6


def test_taps_agree_with_each_other_and_cost_nothing_when_off():
    params, cfg = model("qwen3")
    names = ("resid", "mid", "attn", "q", "k", "k_raw", "v", "head_out", "attn_out", "mlp_out")
    logits, t = jit_forward(params, cfg, IDS, taps=Taps(names))
    close(t["head_out"].sum(3), t["attn_out"], 1e-5)
    close(t["resid"][:-1] + t["attn_out"], t["mid"], 1e-5)
    close(t["mid"] + t["mlp_out"], t["resid"][1:], 1e-5)
    close(t["resid"][0], embed(params, IDS), 0)
    close(head(params, cfg, t["resid"][-1]), logits, 1e-5)
    close(t["attn"].sum(-1), jnp.ones(t["attn"].shape[:-1]), 1e-5)
    v = jnp.repeat(t["v"], cfg.groups, axis=2)
    o = params["layers"]["o"].reshape(2, cfg.heads, cfg.head_dim, -1)
    close(jnp.einsum("lbhts,lbhsd,lhde->lbthe", t["attn"], v, o), t["head_out"], 1e-4)
    one = jit_forward(params, cfg, IDS, taps=Taps(("resid", "attn"), layers=(1,)))[1]
    close(one["resid"], t["resid"][2:], 1e-5), close(one["attn"], t["attn"][1:], 1e-5)
    entropy = Taps(("attn",), reduce=lambda layer, name, a: -jnp.sum(a * jnp.log(a + 1e-9), -1).mean((0, 2)))
    assert jit_forward(params, cfg, IDS, taps=entropy)[1]["attn"].shape == (2, cfg.heads)
    plain = jax.make_jaxpr(lambda p: forward(p, cfg, IDS))(params)
    assert len(plain.out_avals) == 1
    scan = next(e for e in plain.eqns if e.primitive.name == "scan")
    assert len(scan.outvars) == 1


def test_edits():
    params, cfg = model()
    plain, t = jit_forward(params, cfg, IDS, taps=Taps(("resid", "head_out", "attn_out", "mlp_out")))
    same = gates(
        head_scale=jnp.ones((2, cfg.heads)), mlp_scale=jnp.ones(2), resid_add=jnp.zeros((2, 64)), keep=jnp.ones(2, bool)
    )
    close(jit_forward(params, cfg, IDS, edit=same)[0], plain, 1e-5)
    skip = jit_forward(params, cfg, IDS, taps=Taps(("resid",)), edit=gates(keep=jnp.asarray([True, False])))[1]
    close(skip["resid"][2], t["resid"][1], 1e-5)
    scale = jnp.ones((2, cfg.heads)).at[1, 2].set(0.25)
    scaled = jit_forward(params, cfg, IDS, taps=Taps(("attn_out",)), edit=gates(head_scale=scale))[1]
    close(scaled["attn_out"][1], t["attn_out"][1] - 0.75 * t["head_out"][1, :, :, 2], 1e-5)
    chosen = jnp.zeros((2, cfg.heads), bool).at[0, 1].set(True)
    value = jnp.full((2, 2, 11, cfg.heads, 64), 0.5)
    replaced = jit_forward(params, cfg, IDS, taps=Taps(("attn_out",)), edit=gates(head_set=(chosen, value)))[1]
    close(replaced["attn_out"][0], t["attn_out"][0] - t["head_out"][0, :, :, 1] + 0.5, 1e-5)
    moved = jit_forward(params, cfg, IDS, taps=Taps(("resid",)), edit=gates(resid_add=jnp.ones((2, 64))))[1]
    close(moved["resid"][1], t["resid"][1] + 1.0, 1e-5)
    own = Edit(("mlp_out",), lambda site, layer, x, args: x * args, jnp.float32(0.0))
    none = jit_forward(params, cfg, IDS, taps=Taps(("mlp_out",)), edit=own)[1]
    assert float(jnp.max(jnp.abs(none["mlp_out"]))) == 0.0


def ordinary(layer, q, k, v, where, state):
    m = where.mask
    out, lse = attention(
        q, k, v, q_pos=m.q_pos, k_pos=m.k_pos, q_seg=m.q_seg, k_seg=m.k_seg, causal=where.causal, scale=where.scale
    )
    return out, lse, state + layer


def test_a_stand_in_for_attention_sees_what_attention_sees():
    params, cfg = model()
    pos, _ = places(jnp.ones(IDS.shape, bool))
    x, cache = embed(params, IDS), init_cache(cfg, 2, 16)
    out = jit_run(params, cfg, x, pos=pos, cache=cache, attend=ordinary, state=jnp.int32(5), taps=Taps(("aux",)))
    close(out.x, jit_run(params, cfg, x, pos=pos).x, 1e-5)
    assert int(out.state) == 6 and out.taps["aux"].shape == (2, 2, cfg.heads, 11)


def test_gradients_are_the_same_with_recomputation_and_reach_a_tied_table_twice():
    params, cfg = model()

    def loss(p, remat):
        return jnp.mean(jax.nn.log_softmax(forward(p, cfg, IDS, remat=remat)[0])[..., 3])

    grad = jax.jit(jax.grad(loss), static_argnums=1)
    want = grad(params, None)
    for remat in ("full", "dots"):
        jax.tree.map(lambda a, b: close(a, b, 1e-6), grad(params, remat), want)
    untied = {**params, "head": params["embed"]}
    apart = grad(untied, None)
    close(want["embed"], apart["embed"] + apart["head"], 1e-6)


def test_wrong_use_is_told_plainly():
    params, cfg = model()
    pos, _ = places(jnp.ones(IDS.shape, bool))
    x = embed(params, IDS)
    with pytest.raises(ValueError, match="refuses float16"):
        run(params, cfg, x.astype(jnp.float16), pos=pos)
    with pytest.raises(ValueError, match="fewer than the 11 rows"):
        run(params, cfg, x, pos=pos, cache=init_cache(cfg, 2, 8))
    with pytest.raises(ValueError, match="holds 12 tokens a sequence, but 16"):
        run(params, cfg, x[:, :5], pos=pos[:, :5], cache=init_cache(cfg, 2, 12).replace(fill=jnp.asarray([2, 11])))
    with pytest.raises(ValueError, match=r"layers .* within \(0, 2\)"):
        run(params, cfg, x, pos=pos, layers=(1, 3))
    with pytest.raises(ValueError, match="not 'attention'"):
        Taps(("attention",))
    with pytest.raises(ValueError, match="belongs to ordinary attention"):
        run(params, cfg, x, pos=pos, attend=ordinary, taps=Taps(("attn",)))
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        nano(kv_heads=3)
    assert isinstance(cfg, Config)
