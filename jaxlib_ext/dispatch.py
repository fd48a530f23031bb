"""Which implementation of an op runs: decided when the program is lowered, so a TPU compile on a CPU machine gets the
TPU kernel.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

Implementation = Literal["auto", "reference", "tpu", "gpu"]


def check_implementation(implementation: str) -> None:
    """Raises ValueError for a name that is not an implementation."""
    if implementation not in ("auto", "reference", "tpu", "gpu"):
        raise ValueError(f"implementation must be auto, reference, tpu or gpu, got {implementation!r}.")


def varying_together(*args: jax.Array) -> tuple[jax.Array, ...]:
    """Inside shard_map, marks all arguments as varying over every mesh axis that one of them varies over, as kernels
    need.
    """
    axes = [jax.typeof(a).manual_axis_type.varying for a in args]
    union = frozenset().union(*axes)
    return tuple(
        jax.lax.pcast(a, tuple(sorted(union - own)), to="varying") if union - own else a for a, own in zip(args, axes)
    )


def varying_as(value: jax.Array, like: jax.Array) -> jax.Array:
    """A constant marked as varying over the mesh axes that `like` varies over, to start a loop with inside shard_map."""
    axes = jax.typeof(like).manual_axis_type.varying
    return jax.lax.pcast(value, tuple(sorted(axes)), to="varying") if axes else value


def output(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.ShapeDtypeStruct:
    """The output of a kernel that varies over the same mesh axes as its input `like`."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


def run(
    implementation: Implementation,
    *args: jax.Array,
    reference: Callable,
    tpu: Callable,
    gpu: Callable,
    kernels: bool = True,
) -> Any:
    """Calls one of three functions of the same meaning on `args`.

    Args:
        implementation: "auto" takes the kernel of the platform that the program is lowered for, and the reference
            elsewhere.
        kernels: False where the kernels do not take these shapes; "auto" is then the reference. Double precision and
            empty arrays never go to a kernel of "auto".
    """
    if implementation == "tpu":
        return tpu(*varying_together(*args))
    if implementation == "gpu":
        return gpu(*varying_together(*args))
    wide = any(jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize > 4 for a in args)
    if implementation == "reference" or not kernels or wide or any(a.size == 0 for a in args):
        return reference(*args)
    return jax.lax.platform_dependent(*varying_together(*args), tpu=tpu, cuda=gpu, default=reference)
