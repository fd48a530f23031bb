"""A second decoder to hold ours against: plain loops in NumPy at double precision, written from the papers' formulas."""

import numpy as np

from papyrax.methods.nets.rope import frequencies


def _norm(x, w, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * w


def _turn(x, pos, freq, factor):
    """One vector at one position."""
    half = len(freq)
    c, s = np.cos(pos * freq) * factor, np.sin(pos * freq) * factor
    return np.concatenate([x[:half] * c - x[half:] * s, x[half:] * c + x[:half] * s])


def logits(params, cfg, ids, *, causal=True):
    """Logits of one unpadded sequence of ids."""
    p = {k: np.asarray(v, np.float64) for k, v in params["layers"].items()}
    freq, factor = frequencies(cfg.rope, len(ids))
    freq = np.asarray(freq, np.float64)
    table = np.asarray(params["embed"], np.float64)
    x = table[np.asarray(ids)]
    d = cfg.head_dim
    for i in range(cfg.layers):
        u = _norm(x, p["attn_norm"][i], cfg.eps)
        q, k, v = (u @ p[n][i] + (p[n + "_b"][i] if cfg.qkv_bias else 0.0) for n in ("q", "k", "v"))
        mixed = np.zeros((len(ids), cfg.heads * d))
        for h in range(cfg.heads):
            g = h // cfg.groups
            qh, kh, vh = q[:, h * d : (h + 1) * d], k[:, g * d : (g + 1) * d], v[:, g * d : (g + 1) * d]
            if cfg.qk_norm:
                qh, kh = _norm(qh, p["q_norm"][i], cfg.eps), _norm(kh, p["k_norm"][i], cfg.eps)
            qh = np.stack([_turn(r, t, freq, factor) for t, r in enumerate(qh)])
            kh = np.stack([_turn(r, t, freq, factor) for t, r in enumerate(kh)])
            for t in range(len(ids)):
                z = kh[: t + 1 if causal else None] @ qh[t] / np.sqrt(d)
                a = np.exp(z - z.max())
                mixed[t, h * d : (h + 1) * d] = a / a.sum() @ vh[: len(a)]
        x = x + mixed @ p["o"][i]
        u = _norm(x, p["mlp_norm"][i], cfg.eps)
        gate = u @ p["gate"][i]
        x = x + (gate / (1.0 + np.exp(-gate)) * (u @ p["up"][i])) @ p["down"][i]
    x = _norm(x, np.asarray(params["norm"], np.float64), cfg.eps)
    return x @ (table if cfg.tied else np.asarray(params["head"], np.float64)).T
