"""The objectives that the method is judged on: value, exact gradient, stochastic gradient, minimum, smoothness.

#1 ridge-logistic of one vector, f(x) = ln(1 + e^<x,a>) + ridge |x|^2 / 2; #2 quadratic, |x|^2 / 2; both with additive
noise. #3 statistical learning, E ln(1 + e^(-Y <x,Z>)) with Student-t features and one fresh sample a step. Beside
them what real tables need: softmax regression by single rows, and a small network. A `Spec` is hashable; arrays come
as `data`.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from papyrax.methods.optimization.clipped_sgd.noise import Noise, sample, student_t


class Problem(NamedTuple):
    """value(x), gradient(x), sample_gradient(key, x), minimum f*, minimiser x* (None where unknown), smoothness L."""

    value: Callable
    gradient: Callable
    sample_gradient: Callable
    minimum: Array | float
    minimiser: Array | None
    smoothness: Array | float


@dataclasses.dataclass(frozen=True)
class Spec:
    """Which objective, its width and its noise. `ridge` belongs to both logistic kinds, `tail` to the statistical one,
    `classes`, `batch` and `hidden` to tables and networks."""

    kind: Literal["quadratic", "ridge_logistic", "statistical", "table", "network"] = "quadratic"
    dim: int = 100
    noise: Noise = dataclasses.field(default_factory=Noise)
    ridge: float = 0.1
    tail: float = 2.001
    classes: int = 2
    batch: int = 1
    hidden: int = 32


def _additive(value, gradient, noise, minimum, minimiser, smoothness) -> Problem:
    def sample_gradient(key, x):
        return gradient(x) + sample(key, noise, x.shape, x.dtype)

    return Problem(value, gradient, sample_gradient, minimum, minimiser, smoothness)


def quadratic(dim: int, noise: Noise) -> Problem:
    """f(x) = |x|^2 / 2 with additive noise; L = 1, x* = 0."""
    return _additive(lambda x: jnp.sum(x * x) / 2, lambda x: x, noise, 0.0, jnp.zeros(dim), 1.0)


def ridge_logistic(a: Float[Array, "d"], ridge: float, noise: Noise) -> Problem:
    """f(x) = ln(1 + e^<x,a>) + ridge |x|^2 / 2 with additive noise; L = |a|^2 / 4 + ridge.

    x* = -t a where t solves sigmoid(-t |a|^2) = ridge t; the left side falls and the right side rises in t, and
    bisection on [0, 1/(2 ridge)] is run to the last bit.
    """
    if not ridge > 0:
        raise ValueError(f"ridge must be positive so that a minimiser exists, got {ridge}.")
    square = jnp.sum(a * a)

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        rising = jax.nn.sigmoid(-middle * square) > ridge * middle
        return jnp.where(rising, middle, low), jnp.where(rising, high, middle)

    low, high = jax.lax.fori_loop(0, 60, halve, (jnp.zeros_like(square), jnp.full_like(square, 0.5 / ridge)))
    minimiser = -(low + high) / 2 * a

    def value(x):
        return jax.nn.softplus(jnp.vdot(x, a.astype(x.dtype))) + ridge * jnp.sum(x * x) / 2

    def gradient(x):
        b = a.astype(x.dtype)
        return jax.nn.sigmoid(jnp.vdot(x, b)) * b + ridge * x

    return _additive(value, gradient, noise, value(minimiser), minimiser, square / 4 + ridge)


def _logistic(x, features, signs):
    return jnp.mean(jax.nn.softplus(-signs * (features @ x)))


def newton(value: Callable, x0: Float[Array, "d"], steps: int = 30) -> Float[Array, "d"]:
    """Minimiser of a smooth convex function by Newton's method with the best of 12 halved step lengths."""
    lengths = 0.5 ** jnp.arange(12, dtype=x0.dtype)

    def improve(x, _):
        direction = jnp.linalg.solve(jax.hessian(value)(x) + 1e-12 * jnp.eye(x.size, dtype=x.dtype), jax.grad(value)(x))
        trials = x - lengths[:, None] * direction
        values = jax.vmap(value)(trials)
        best = jnp.nanargmin(values)
        return jnp.where(values[best] < value(x), trials[best], x), None

    return jax.lax.scan(improve, x0, length=steps)[0]


def statistical_data(
    key: Key[Array, ""], dim: int, tail: float, rows: int, planted_norm: float = 1.0
) -> dict[str, Array]:
    """A fixed evaluation sample for #3 and its minimiser: Student-t features, labels Bernoulli(sigmoid(<x_planted,
    z>)).

    Returns features F"rows dim", signs F"rows", planted, minimiser F"dim", minimum and smoothness E|Z|^2 / 4 (of the
    sample).
    """
    k1, k2, k3 = jax.random.split(key, 3)
    planted = jnp.full((dim,), planted_norm / math.sqrt(dim)) * jax.random.rademacher(k1, (dim,), jnp.float32)
    features = student_t(k2, (rows, dim), tail)
    signs = jnp.where(jax.random.uniform(k3, (rows,)) < jax.nn.sigmoid(features @ planted), 1.0, -1.0)
    minimiser = newton(partial(_logistic, features=features, signs=signs), jnp.zeros(dim))
    return {
        "features": features,
        "signs": signs,
        "planted": planted,
        "minimiser": minimiser,
        "minimum": _logistic(minimiser, features, signs),
        "smoothness": jnp.mean(jnp.sum(features**2, -1)) / 4,
    }


def statistical(spec: Spec, data: dict[str, Array]) -> Problem:
    """#3: the stochastic gradient draws a fresh sample, value and f* are those of the fixed evaluation sample."""
    value = partial(_logistic, features=data["features"], signs=data["signs"])

    def sample_gradient(key, x):
        k1, k2 = jax.random.split(key)
        z = student_t(k1, x.shape, spec.tail, x.dtype)
        sign = jnp.where(
            jax.random.uniform(k2) < jax.nn.sigmoid(jnp.vdot(z, data["planted"].astype(x.dtype))), 1.0, -1.0
        )
        return -sign.astype(x.dtype) * jax.nn.sigmoid(-sign * jnp.vdot(z, x)) * z

    return Problem(value, jax.grad(value), sample_gradient, data["minimum"], data["minimiser"], data["smoothness"])


def softmax_loss(
    weights: Float[Array, "d c"], features: Float[Array, "n d"], labels: Int[Array, "n"]
) -> Float[Array, "n"]:
    """Cross entropy of each row."""
    logits = features @ weights
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]


def table_data(
    features: Float[Array, "n d"], labels: Int[Array, "n"], classes: int, ridge: float, steps: int = 30
) -> dict[str, Array]:
    """Softmax regression on a table: arrays, minimiser, minimum and smoothness max |z|^2 / 2 averaged over rows +
    ridge.

    L = lambda_max(Z^T Z / n) / 2 + ridge bounds the Hessian of the mean cross entropy.
    """
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(f"features must be [n, d] with labels [n], got {features.shape} and {labels.shape}.")
    spec = Spec(kind="table", dim=features.shape[1] * classes, classes=classes, ridge=ridge)
    value = partial(_table_value, spec=spec, features=features, labels=labels)
    minimiser = newton(value, jnp.zeros(spec.dim, features.dtype), steps)
    top = jnp.linalg.eigvalsh(features.T @ features / features.shape[0])[-1]
    return {
        "features": features,
        "labels": labels,
        "minimiser": minimiser,
        "minimum": value(minimiser),
        "smoothness": top / 2 + ridge,
    }


def _table_value(x, spec, features, labels):
    weights = x.reshape(features.shape[1], spec.classes)
    return jnp.mean(softmax_loss(weights, features, labels)) + spec.ridge * jnp.sum(x * x) / 2


def _minibatch(spec, data, loss):
    """Stochastic gradient of a mean loss by `batch` rows drawn with replacement, plus the spec's noise."""

    def sample_gradient(key, x):
        k1, k2 = jax.random.split(key)
        rows = jax.random.randint(k1, (spec.batch,), 0, data["labels"].shape[0])
        g = jax.grad(loss)(x, features=data["features"][rows], labels=data["labels"][rows])
        return g + sample(k2, spec.noise, x.shape, x.dtype)

    return sample_gradient


def table(spec: Spec, data: dict[str, Array]) -> Problem:
    """Softmax regression by minibatches of `spec.batch` rows."""
    loss = partial(_table_value, spec=spec)
    value = partial(loss, features=data["features"], labels=data["labels"])
    sampler = _minibatch(spec, data, loss)
    return Problem(value, jax.grad(value), sampler, data["minimum"], data["minimiser"], data["smoothness"])


def network_size(spec: Spec, width: int) -> int:
    """Number of parameters of the one-hidden-layer network on `width` features."""
    return width * spec.hidden + spec.hidden + spec.hidden * spec.classes


def network_loss(
    x: Float[Array, "p"], spec: Spec, features: Float[Array, "n d"], labels: Int[Array, "n"]
) -> Float[Array, ""]:
    """Mean cross entropy of tanh(z W1 + b) W2 with all parameters in one flat vector."""
    d, h = features.shape[1], spec.hidden
    w1, b, w2 = jnp.split(x, [d * h, d * h + h])
    hidden = jnp.tanh(features @ w1.reshape(d, h) + b)
    return jnp.mean(softmax_loss(w2.reshape(h, spec.classes), hidden, labels))


def network(spec: Spec, data: dict[str, Array]) -> Problem:
    """A small network on a table: not convex, so f* is put at 0 and neither minimiser nor L is known (L must be
    chosen)."""
    loss = partial(network_loss, spec=spec)
    value = partial(loss, features=data["features"], labels=data["labels"])
    return Problem(value, jax.grad(value), _minibatch(spec, data, loss), 0.0, None, 1.0)


def build(spec: Spec, data: dict[str, Array] | None = None) -> Problem:
    """The problem that a spec names; `data` is what `statistical_data` or `table_data` returned, where the kind needs
    it."""
    if spec.kind == "quadratic":
        return quadratic(spec.dim, spec.noise)
    if spec.kind == "ridge_logistic":
        return ridge_logistic(jnp.full((spec.dim,), spec.dim**-0.5), spec.ridge, spec.noise)
    if data is None:
        raise ValueError(f"an objective of kind {spec.kind!r} needs data, got None.")
    makers = {"statistical": statistical, "table": table, "network": network}
    if spec.kind not in makers:
        raise ValueError(f"kind must be quadratic, ridge_logistic, statistical, table or network, got {spec.kind!r}.")
    return makers[spec.kind](spec, data)
