"""Cross-entropy of logits against HL-Gauss histograms of scalar targets, without the histograms in memory."""

from typing import Literal

from jaxtyping import Array, Float

from papyrax.jaxlib_ext.hl_gauss import reference


def hl_gauss_cross_entropy(
    logits: Float[Array, "n b"],
    value: Float[Array, "n"],
    vmin: float,
    vmax: float,
    *,
    sigma_ratio: float = 0.75,
    implementation: Literal["auto", "reference", "tpu", "gpu"] = "auto",
    interpret: bool = False,
) -> Float[Array, "n"]:
    """Cross-entropy, in nats, between softmax(logits) and the HL-Gauss histogram of each value."""
    return reference.cross_entropy(logits, value, vmin, vmax, sigma_ratio)
