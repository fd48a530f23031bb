"""Linear layer, layer or RMS normalisation and swish in one pass over the rows."""

import dataclasses
import functools
from types import ModuleType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from papyrax.jaxlib_ext import dispatch
from papyrax.jaxlib_ext.linear_norm import cpu, gpu, reference, tpu


@dataclasses.dataclass(frozen=True)
class _Spec:
    norm: reference.Norm
    eps: float
    interpret: bool


def linear_norm_swish(
    x: Float[Array, "n i"],
    w: Float[Array, "i o"],
    b: Float[Array, "o"] | None = None,
    scale: Float[Array, "o"] | None = None,
    bias: Float[Array, "o"] | None = None,
    *,
    norm: reference.Norm = "layer",
    eps: float = 1e-6,
    implementation: dispatch.Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, "n o"]:
    """swish(norm(x w + b) * scale + bias), row by row; parameters that are None are left out.

    `norm` is "layer" (mean and biased variance over the o features), "rms" or "none" (then scale and bias act on x w +
    b itself).
    Products accumulate in float32 and statistics are float32 for float32 and bfloat16 inputs; matrix products have the
    platform's default precision (bfloat16 passes on TPU, TF32 on GPU for float32 inputs), as XLA's own have.

    Gradients with respect to all five arrays. The kernels keep nothing but the inputs: the backward one multiplies x w
    again, which costs less than writing and reading [n, o] while i is below about 1,000 (a v5e does 240 FLOPs in the
    time of one byte). Forward-mode and second derivatives
    need implementation="reference", on a CPU too.

    Why a kernel pays, for n rows, e bytes an entry, beside 2 n i o FLOPs forward:
        plain: writes h, reads it for the mean, for the variance and for the output, writes y: 5 n o e bytes, 3 at best
        when XLA fuses both statistics; the kernel writes y alone: n o e. Backward, plain: at least 6 n o e around dh;
        the kernel reads dy and writes dh, 2 n o e, for 2 n i o more FLOPs. At n 2,048, i = o = 512, float32: forward 5
        MB of x, w and y moved instead of 14 to 22 MB, with 1.1 GFLOP: about 6 us of traffic against 17 to 27 on a v5e,
        and 6 us of products hidden behind either.
    It pays for wide batches and i up to about a thousand; for i much larger the product dominates and plain XLA is as
    good.

    Args:
        implementation: "auto" takes the kernel of the platform for o <= 2,048 and x and w of one dtype, on a CPU the
            form of `cpu` for float32, else the reference.
        interpret: run the kernel named by `implementation` in Pallas' interpreter.

    Returns: the dtype of x.
    Raises: ValueError for shapes that do not match, an unknown norm, eps < 0, or a kernel asked for more features than
        it takes.
    Source: module docstring of `reference`.
    """
    dispatch.check_implementation(implementation)
    if norm not in ("layer", "rms", "none"):
        raise ValueError(f"norm must be layer, rms or none, got {norm!r}.")
    if not eps >= 0:
        raise ValueError(f"eps must not be negative, got {eps}.")
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(f"x and w must have shapes [n, i] and [i, o], got {x.shape} and {w.shape}.")
    for name, line in (("b", b), ("scale", scale), ("bias", bias)):
        if line is not None and line.shape != w.shape[1:]:
            raise ValueError(f"{name} must have shape {w.shape[1:]} like the columns of w, got {line.shape}.")
    limit = {"tpu": tpu.MAX_FEATURES, "gpu": gpu.MAX_FEATURES}.get(implementation)
    if limit is not None and w.shape[1] > limit:
        raise ValueError(f"the {implementation} kernel takes at most {limit} output features, got {w.shape[1]}.")
    if implementation == "reference":
        return reference.linear_norm_swish(x, w, b, scale, bias, norm, float(eps))
    zeros = jnp.zeros(w.shape[1], jnp.float32)
    b = zeros if b is None else b
    scale = zeros + 1.0 if scale is None else scale
    bias = zeros if bias is None else bias
    arrays = dispatch.varying_together(x, w, b, scale, bias)
    spec = _Spec(norm, float(eps), interpret)
    plain = functools.partial(reference.linear_norm_swish, norm=norm, eps=spec.eps)
    # keeps the normalised product: on a CPU a second product costs more than memory
    on_cpu = functools.partial(cpu.linear_norm_swish, norm=norm, eps=spec.eps)
    # the GPU's limit is the smaller one; both kernels want operands of one dtype for the matrix unit
    fits = w.shape[1] <= min(tpu.MAX_FEATURES, gpu.MAX_FEATURES) and x.dtype == w.dtype
    kernels = implementation != "auto" or fits
    return dispatch.run(
        implementation,
        *arrays,
        reference=lambda *a: jax.lax.platform_dependent(*a, cpu=on_cpu, default=plain),
        tpu=functools.partial(_fused, tpu, spec) if kernels else plain,
        gpu=functools.partial(_fused, gpu, spec) if kernels else plain,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(kernels: ModuleType, spec: _Spec, x, w, b, scale, bias) -> Array:
    return kernels.forward(x, w, b, scale, bias, norm=spec.norm, eps=spec.eps, interpret=spec.interpret)


def _forward(kernels, spec, *args):
    return _fused(kernels, spec, *args), args


def _backward(kernels, spec, args, dy):
    x, w, b, scale, bias = args
    options = dataclasses.asdict(spec)
    dh, sums = kernels.gradient_before_norm(dy, x, w, b, scale, bias, **options)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    dx = jnp.matmul(dh, w.T, preferred_element_type=wide).astype(x.dtype)
    dw = jnp.matmul(x.T, dh, preferred_element_type=wide).astype(w.dtype)
    db, dscale, dbias = (line.astype(like.dtype) for line, like in zip(sums, (b, scale, bias)))
    return dx, dw, db, dscale, dbias


_fused.defvjp(_forward, _backward)
