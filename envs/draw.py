"""Pictures of worlds by Pillow alone, for films on machines without a display (host).

Every function takes plain numbers and gives uint8 [h, w, 3]. Shapes are drawn at twice the size and shrunk, which
smooths their edges.
"""

import jax
import numpy as np
from PIL import Image, ImageDraw

from papyrax.envs.protocol import World

PAPER = (250, 249, 245)
INK = (61, 61, 58)
FAINT = (220, 218, 209)
BLUE = (58, 104, 168)
CLAY = (204, 120, 92)
SMOOTH = 2


def pendulums(angle: np.ndarray, speed: np.ndarray, *, size: int = 160) -> np.ndarray:
    """k pendulums side by side; rods turn from blue (hanging) to clay (upright)."""
    k = len(angle)
    image, pen = canvas(size * k, size)
    length = 0.36 * size
    for j in range(k):
        x, y = size * (j + 0.5), size * 0.5
        height = 0.5 * (1 + np.cos(angle[j]))
        color = mix(BLUE, CLAY, height)
        end = (x + length * np.sin(angle[j]), y - length * np.cos(angle[j]))
        disc(pen, (x, y), length, outline=FAINT, width=1)
        line(pen, [(x, y), end], color, width=0.05 * size)
        disc(pen, end, 0.06 * size, fill=color)
        disc(pen, (x, y), 0.025 * size, fill=INK)
    return finish(image)


def canvas(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """An empty picture, `SMOOTH` times as large as what `finish` gives, and its pen. The helpers below take final
    coordinates.
    """
    image = Image.new("RGB", (width * SMOOTH, height * SMOOTH), PAPER)
    return image, ImageDraw.Draw(image)


def finish(image: Image.Image) -> np.ndarray:
    """The smoothed picture as uint8 [h, w, 3]."""
    return np.asarray(image.resize((image.width // SMOOTH, image.height // SMOOTH), Image.Resampling.BOX))


def line(pen: ImageDraw.ImageDraw, points, color, width: float = 1.0) -> None:
    """A line with round ends."""
    points = [(SMOOTH * float(x), SMOOTH * float(y)) for x, y in points]
    wide = max(1, round(SMOOTH * width))
    pen.line(points, fill=color, width=wide, joint="curve")
    for x, y in points:
        r = wide / 2 - 0.5
        pen.ellipse((x - r, y - r, x + r, y + r), fill=color)


def disc(pen: ImageDraw.ImageDraw, center, radius: float, fill=None, outline=None, width: float = 1.0) -> None:
    """A disc or a circle."""
    x, y, r = SMOOTH * float(center[0]), SMOOTH * float(center[1]), SMOOTH * float(radius)
    pen.ellipse((x - r, y - r, x + r, y + r), fill=fill, outline=outline, width=max(1, round(SMOOTH * width)))


def polygon(pen: ImageDraw.ImageDraw, points, fill, outline=None) -> None:
    """A filled polygon."""
    pen.polygon([(SMOOTH * float(x), SMOOTH * float(y)) for x, y in points], fill=fill, outline=outline)


def mix(a, b, t: float) -> tuple[int, int, int]:
    """The color between a (t = 0) and b (t = 1)."""
    red, green, blue = (round(float(x + (y - x) * t)) for x, y in zip(a, b))
    return red, green, blue


def cartpole(
    x: float, angle: float, *, rail: float = 2.4, length: float = 1.0, size: tuple[int, int] = (200, 400)
) -> np.ndarray:
    """A cart with its pole on a rail of ± `rail` metres; angle 0 is upright, positive leans right."""
    height, width = size
    image, pen = canvas(width, height)
    scale = 0.46 * width / rail
    ground = 0.5 * height
    px = 0.5 * width + scale * x
    line(pen, [(0.04 * width, ground), (0.96 * width, ground)], FAINT, width=3)
    line(pen, [(0.5 * width, ground - 5), (0.5 * width, ground + 5)], FAINT, width=2)
    polygon(pen, [(px - 22, ground - 9), (px + 22, ground - 9), (px + 22, ground + 9), (px - 22, ground + 9)], INK)
    arm = min(scale * length, 0.45 * height)
    color = mix(BLUE, CLAY, 0.5 * (1 + np.cos(angle)))
    line(pen, [(px, ground), (px + arm * np.sin(angle), ground - arm * np.cos(angle))], color, width=8)
    disc(pen, (px, ground), 4, fill=PAPER)
    return finish(image)


def slider(x: float, v: float, *, reach: float = 2.0, size: tuple[int, int] = (80, 400)) -> np.ndarray:
    """A mass on a line, its goal in the middle, and its speed as a stroke of 0.3 times its length."""
    height, width = size
    image, pen = canvas(width, height)
    scale, y = 0.46 * width / reach, 0.55 * height
    px = 0.5 * width + scale * float(np.clip(x, -reach, reach))
    line(pen, [(0.04 * width, y), (0.96 * width, y)], FAINT, width=3)
    disc(pen, (0.5 * width, y), 12, outline=CLAY, width=2)
    line(pen, [(px, y), (px + 0.3 * scale * v, y)], BLUE, width=3)
    disc(pen, (px, y), 8, fill=INK)
    return finish(image)


def film(world: World, states, *, every: int = 1) -> np.ndarray:
    """Frames uint8 [t, h, w, 3] of stacked states (`papyrax.envs.rollout.record`), one for each `every` states.

    Raises:
        ValueError: the world has no picture.
    """
    if world.draw is None:
        raise ValueError(f"world {world.name} cannot be drawn: its draw is None.")
    count = jax.tree.leaves(states)[0].shape[0]
    return np.stack([world.draw(jax.tree.map(lambda x, i=i: x[i], states)) for i in range(0, count, every)])
