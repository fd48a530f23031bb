"""Linear layer, layer or RMS normalisation and swish in one pass over the rows."""

from typing import Literal

from jaxtyping import Array, Float

from papyrax.jaxlib_ext.linear_norm import reference


def linear_norm_swish(
    x: Float[Array, "n i"],
    w: Float[Array, "i o"],
    b: Float[Array, "o"] | None = None,
    scale: Float[Array, "o"] | None = None,
    bias: Float[Array, "o"] | None = None,
    *,
    norm: reference.Norm = "layer",
    eps: float = 1e-6,
    implementation: Literal["auto", "reference", "tpu", "gpu"] = "auto",
    interpret: bool = False,
) -> Float[Array, "n o"]:
    """swish(norm(x w + b) * scale + bias), row by row; parameters that are None are left out."""
    return reference.linear_norm_swish(x, w, b, scale, bias, norm, eps)
