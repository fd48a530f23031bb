"""Holds an op to the kernel proof: kernels equal their reference, compile for a TPU, and lower for CUDA.

    check_op(op, [case, ...], grads=(0, 1))     # values and gradients in interpret mode, Pallas TPU and Triton
    check_tpu_compile(op, *arrays)              # forward and backward through the real TPU compiler
    check_cuda_lowering(op, *arrays)            # forward and backward hold Triton kernels

`op` takes its arrays by position, and `implementation` and `interpret` by name.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from papyrax.train import compile as aot

TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-2}
"""Largest error beside the largest entry: float32 sums in another order; one rounding to bfloat16 is 4e-3."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: arrays by position, options by name."""

    args: tuple
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def normal(key: int, shape: tuple[int, ...], dtype: Any = jnp.float32, scale: float = 1.0) -> jax.Array:
    """Numbers to test with: normal, the same every time."""
    return jnp.asarray(np.random.default_rng(key).normal(size=shape) * scale, dtype)


def _floating(tree: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def _both_passes(op: Callable, args: tuple, grads: Sequence[int], options: Mapping[str, Any]) -> Callable:
    """(value, gradients) of the op as one function of all its arrays.

    The gradients, of the arguments numbered in `grads`, are those of the floating outputs' sum with fixed random weights.
    """

    def passes(*args):
        def scalar(*chosen):
            full = list(args)
            for place, value in zip(grads, chosen):
                full[place] = value
            out = op(*full, **options)
            weighted = [jnp.sum(o.astype(jnp.float32) * normal(17 + i, o.shape)) for i, o in enumerate(_floating(out))]
            return sum(weighted), out

        if not grads:
            return op(*args, **options), ()
        places = tuple(range(len(grads)))
        gradient, value = jax.grad(scalar, argnums=places, has_aux=True)(*[args[g] for g in grads])
        return value, gradient

    return passes


def assert_close(ours: Any, wanted: Any, tolerance: float, what: str) -> None:
    """Every leaf within `tolerance` of the leaf's largest entry; integers, shapes, dtypes, infinities and NaN
    exactly.
    """
    ours, wanted = jax.tree.leaves(ours), jax.tree.leaves(wanted)
    assert len(ours) == len(wanted), f"{what}: {len(ours)} results instead of {len(wanted)}"
    for a, b in zip(ours, wanted):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {a.dtype}{a.shape} instead of {b.dtype}{b.shape}"
        if not jnp.issubdtype(b.dtype, jnp.floating):
            np.testing.assert_array_equal(a, b, err_msg=what)
            continue
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        finite = b[np.isfinite(b)]
        scale = max(1e-6, float(np.abs(finite).max())) if finite.size else 1.0
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale, err_msg=what)


def check_op(
    op: Callable,
    cases: Sequence[Case],
    *,
    grads: Sequence[int] = (),
    tolerances: Mapping[str, float] | None = None,
    implementations: Sequence[str] = ("tpu", "gpu"),
) -> None:
    """Values, and gradients of the arguments numbered in `grads`, of the kernels in interpret mode against the
    reference.

    Gradients of the reference come from JAX's own differentiation of it, so a wrong formula in a custom rule is found.
    `auto` is held to the same on this machine. The tolerance of a case is that of its narrowest floating argument.
    """
    limits = TOLERANCES | dict(tolerances or {})
    for number, case in enumerate(cases):
        dtypes = {leaf.dtype.name for leaf in _floating(case.args)}
        tolerance = max(limits.get(name, limits["float32"]) for name in dtypes)
        places = [g for g in grads if case.args[g] is not None]

        def evaluate(case=case, places=places, **options):
            passes = _both_passes(op, case.args, places, {**case.options, **options})
            return jax.jit(passes)(*case.args)

        value, gradient = evaluate(implementation="reference")
        for implementation in (*implementations, "auto"):
            ours = evaluate(implementation=implementation, interpret=implementation != "auto")
            shapes = [getattr(a, "shape", None) for a in case.args]
            what = f"{implementation}, case {number} {shapes} {sorted(dtypes)} {dict(case.options)}"
            assert_close(ours[0], value, tolerance, f"value: {what}")
            assert_close(ours[1], gradient, tolerance, f"gradient: {what}")


def _shapes(args: tuple, sharding: Any = None) -> tuple:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args)


def check_tpu_compile(op: Callable, *args: Any, grads: Sequence[int] = (), **options: Any) -> aot.CompileResult:
    """Compiles the op (with gradients of the arguments in `grads`) for one v5e chip, and finds its kernels in the
    program.

    The op is called with implementation "auto", so the choice of the kernel by the lowering platform is tested too.
    """
    try:
        device = aot.topology_devices("v5e:1x1")[0]
    except aot.NoCompiler as error:
        pytest.skip(str(error))
    shapes = _shapes(args, SingleDeviceSharding(device))
    compiled = jax.jit(_both_passes(op, args, grads, options)).trace(*shapes).lower().compile()
    kernels = compiled.as_text().count('custom_call_target="tpu_custom_call"')
    assert kernels >= (2 if grads else 1), f"the program holds {kernels} TPU kernels"
    return compiled


def check_cuda_lowering(op: Callable, *args: Any, grads: Sequence[int] = (), **options: Any) -> str:
    """Lowers the op (with gradients) for CUDA and finds its Triton kernels in the program."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("lowering for CUDA needs the package jax-cuda13-plugin")
    traced = jax.jit(_both_passes(op, args, grads, options)).trace(*_shapes(args))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernels = text.count("@__gpu$xla.gpu.triton")
    assert kernels >= (2 if grads else 1), f"the program holds {kernels} Triton kernels"
    return text
