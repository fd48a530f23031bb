import jax
import jax.numpy as jnp
import numpy as np

from papyrax.methods.objectives.duals import log_dual


def test_the_multiplier_rises_when_the_constraint_is_broken_and_falls_when_it_holds():
    for slack, sign in ((-0.3, 1), (0.3, -1)):
        grad = jax.grad(lambda x, s=slack: log_dual(x, jnp.asarray([s]))[1])(jnp.log(0.2))
        np.testing.assert_allclose(grad, -sign * 0.2 * 0.3, rtol=1e-5)
        assert jnp.sign(-grad) == sign


def test_no_gradient_reaches_the_slack():
    lam, loss = log_dual(jnp.log(0.5), jnp.asarray([1.0, 3.0]))
    np.testing.assert_allclose([lam, loss], [0.5, 1.0], rtol=1e-6)
    assert not jax.grad(lambda s: log_dual(jnp.log(0.5), s)[1])(jnp.ones(2)).any()
