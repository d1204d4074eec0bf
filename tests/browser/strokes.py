"""Real digits as strokes: thinned to lines one pixel wide (Zhang and Suen 1984), which are then followed."""

from __future__ import annotations

import numpy as np

Point = tuple[float, float]
AROUND = ((-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1))  # clockwise from above


def thinned(ink: np.ndarray) -> np.ndarray:
    """The lines of a picture, True where there is ink."""
    ink = np.pad(ink, 1)
    while True:
        before = ink.copy()
        for half in (0, 1):
            ring = [np.roll(ink, (-y, -x), (0, 1)) for y, x in AROUND]
            count = sum(part.astype(int) for part in ring)
            turns = sum((~ring[i] & ring[(i + 1) % 8]).astype(int) for i in range(8))
            up, right, down, left = ring[0], ring[2], ring[4], ring[6]
            open_ = ~(up & right & down) & ~(right & down & left)
            if half:
                open_ = ~(up & right & left) & ~(up & down & left)
            ink = ink & ~((count >= 2) & (count <= 6) & (turns == 1) & open_)
        if (ink == before).all():
            return ink[1:-1, 1:-1]


def strokes(digit: np.ndarray) -> list[list[Point]]:
    """Lines of points (x, y) that a pen goes along, in pixels of the picture."""
    left = {(int(y), int(x)) for y, x in np.argwhere(thinned(digit > 100))}
    found = []
    while left:
        # From an end, if there is one, to wherever it goes on.
        at = min(left, key=lambda p: (sum((p[0] + y, p[1] + x) in left for y, x in AROUND), p))
        left.remove(at)
        line = [at]
        while near := [(at[0] + y, at[1] + x) for y, x in AROUND if (at[0] + y, at[1] + x) in left]:
            at = min(near, key=lambda p: abs(p[0] - line[-1][0]) + abs(p[1] - line[-1][1]))
            left.remove(at)
            line.append(at)
        found.append([(x + 0.5, y + 0.5) for y, x in line])
    return found
