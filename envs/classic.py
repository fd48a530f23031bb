"""Closed-form control worlds: the double integrator and the cart-pole swing-up.

Double integrator: with action u in [-1, 1], `v <- v + 0.1 u`, then `x <- x + 0.1 v`; reward is minus the cost
`x² + 0.1 v² + 0.1 u²` of the place and speed before the step; 100 steps, starts uniform in [-1, 1]².

Cart-pole swing-up: the cart-pole of the DM Control suite (Tassa et al. 2018, arXiv 1801.00690) as MuJoCo Playground
sets it up, without a simulator. Cart 1 kg on a rail of ±1.8 m, pole a uniform capsule of 0.1 kg, 1 m long and 4.5 cm in
radius, force 10 N times the action, steps of 10 ms, semi-implicit Euler (speeds first). Angle 0 is upright. For cart
mass M, pole mass m, distance l to the pole's centre of mass and inertia I about it:

    (M + m) x'' + m l cos th th'' = F - c x' + m l sin th th'²
    m l cos th x'' + (I + m l²) th'' = m g l sin th - d th'

The rail ends in a dead stop where MuJoCo has a stiff spring; away from it the two agree.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from papyrax.envs import draw
from papyrax.envs.protocol import Step, World

CART_MASS, POLE_MASS, POLE_LENGTH, POLE_RADIUS = 1.0, 0.1, 1.0, 0.045
GRAVITY, FORCE, CART_DAMPING, POLE_DAMPING = 9.81, 10.0, 5e-4, 2e-6
RAIL, CART_DT = 1.8, 0.01


@flax.struct.dataclass
class Point:
    """Place and speed of the double integrator."""

    x: Float[Array, ""]
    v: Float[Array, ""]


@flax.struct.dataclass
class CartPole:
    """Place of the cart (m), angle of the pole (rad, 0 upright, positive towards +x) and their speeds."""

    x: Float[Array, ""]
    angle: Float[Array, ""]
    x_speed: Float[Array, ""]
    angle_speed: Float[Array, ""]


@functools.cache
def double_integrator() -> World:
    """The double integrator: observation (x, v), one action."""

    def reset(key: Key[Array, ""]) -> Point:
        x, v = jax.random.uniform(key, (2,), minval=-1.0, maxval=1.0)
        return Point(x=x, v=v)

    def observe(state: Point) -> Float[Array, "2"]:
        return jnp.stack([state.x, state.v])

    def step(state: Point, action: Float[Array, "1"]) -> tuple[Point, Step]:
        u = jnp.clip(action[0], -1.0, 1.0)
        v = state.v + 0.1 * u
        x = state.x + 0.1 * v
        reward = -(state.x**2 + 0.1 * state.v**2 + 0.1 * u**2)
        return _stepped(Point(x=x, v=v), reward, observe)

    return World(
        name="double_integrator",
        reset=reset,
        observe=observe,
        step=step,
        obs_dim=2,
        act_dim=1,
        episode_length=100,
        draw=lambda state: draw.slider(float(state.x), float(state.v)),
    )


@functools.cache
def cartpole_swingup() -> World:
    """The cart-pole swing-up: observation (x, cos, sin, x', th'), one action, 1000 steps, reward in [0, 1]."""
    return World(
        name="cartpole_swingup",
        reset=cartpole_reset,
        observe=cartpole_observe,
        step=cartpole_step,
        obs_dim=5,
        act_dim=1,
        episode_length=1000,
        draw=lambda state: draw.cartpole(float(state.x), float(state.angle), rail=RAIL),
    )


def cartpole_reset(key: Key[Array, ""]) -> CartPole:
    """Hanging at rest in the middle, with normal noise of 0.01 on every number."""
    x, angle, x_speed, angle_speed = 0.01 * jax.random.normal(key, (4,))
    return CartPole(x=x, angle=jnp.pi + angle, x_speed=x_speed, angle_speed=angle_speed)


def cartpole_observe(state: CartPole) -> Float[Array, "5"]:
    """Place, cosine, sine, speeds."""
    return jnp.stack([state.x, jnp.cos(state.angle), jnp.sin(state.angle), state.x_speed, state.angle_speed])


def cartpole_step(state: CartPole, action: Float[Array, "1"]) -> tuple[CartPole, Step]:
    """One step of 10 ms."""
    a = jnp.clip(action[0], -1.0, 1.0)
    arm = 0.5 * POLE_LENGTH
    sin, cos = jnp.sin(state.angle), jnp.cos(state.angle)
    # Two linear equations for the two accelerations (module docstring), solved by Cramer's rule.
    m11, m12 = CART_MASS + POLE_MASS, POLE_MASS * arm * cos
    m22 = capsule_inertia(POLE_MASS, POLE_LENGTH, POLE_RADIUS) + POLE_MASS * arm**2
    f1 = FORCE * a - CART_DAMPING * state.x_speed + POLE_MASS * arm * sin * state.angle_speed**2
    f2 = POLE_MASS * GRAVITY * arm * sin - POLE_DAMPING * state.angle_speed
    det = m11 * m22 - m12 * m12
    x_speed = state.x_speed + CART_DT * (m22 * f1 - m12 * f2) / det
    angle_speed = state.angle_speed + CART_DT * (m11 * f2 - m12 * f1) / det
    x = state.x + CART_DT * x_speed
    x_speed = jnp.where(jnp.abs(x) > RAIL, 0.0, x_speed)
    after = CartPole(
        x=jnp.clip(x, -RAIL, RAIL),
        angle=state.angle + CART_DT * angle_speed,
        x_speed=x_speed,
        angle_speed=angle_speed,
    )
    return _stepped(after, swingup_reward(after.x, after.angle, after.angle_speed, a), cartpole_observe)


def swingup_reward(
    x: Float[Array, "*s"], angle: Float[Array, "*s"], angle_speed: Float[Array, "*s"], action: Float[Array, "*s"]
) -> Float[Array, "*s"]:
    """The smooth swing-up reward of the DM Control suite: upright, centred, gentle and slow, each a factor in [0, 1]."""
    upright = 0.5 * (1 + jnp.cos(angle))
    centered = 0.5 * (1 + 0.1 ** (x / 2) ** 2)
    gentle = 0.2 * (4 + jnp.maximum(0.0, 1 - action**2))
    slow = 0.5 * (1 + 0.1 ** (angle_speed / 5) ** 2)
    return upright * centered * gentle * slow


def capsule_inertia(mass: float, length: float, radius: float) -> float:
    """Inertia of a uniform capsule about an axis through its centre, across its length.

    `length` is that of the cylinder between the two half balls.
    """
    ball = mass * 4 * radius / (4 * radius + 3 * length)
    cylinder = mass - ball
    # Each half ball: its centre of mass lies 3 r / 8 beyond the cylinder's end.
    ends = ball * (0.4 * radius**2 + 0.25 * length**2 + 0.375 * radius * length)
    return cylinder * (0.25 * radius**2 + length**2 / 12) + ends


def lqr_gain(steps: int = 100) -> np.ndarray:
    """Gain k of the linear-quadratic regulator of the double integrator, action = -k . (x, v), far from the end (host).

    Clipped to [-1, 1] it returns -5.1 on average over random starts, a strong reference for learners; unclipped, -3.7.
    """
    a = np.array([[1.0, 0.1], [0.0, 1.0]])
    b = np.array([[0.01], [0.1]])
    q, r = np.diag([1.0, 0.1]), np.array([[0.1]])
    cost = np.zeros((2, 2))
    gain = np.zeros((1, 2))
    for _ in range(steps):
        gain = np.linalg.solve(r + b.T @ cost @ b, b.T @ cost @ a)
        cost = q + a.T @ cost @ (a - b @ gain)
    return gain[0]


def _stepped(state, reward, observe):
    never = jnp.array(False)
    obs = observe(state)
    return state, Step(obs=obs, reward=reward, cost=None, done=never, trunc=never, next_obs=obs)
