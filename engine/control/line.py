"""Seconds as a line over a size, learnt online."""

from __future__ import annotations

_KEEP = 0.97  # what a round-old time still counts


class Line:
    """Seconds as a line over a size, by decayed least squares about a slope that is expected; the
    more the sizes vary, the less that counts. The slope is never negative. `slack`: seconds
    beyond three times what was expected, from which on one is cut."""

    def __init__(self, slope: float = 0.0, *, stiffness: float = 1.0, slack: float = 1e-4) -> None:
        self._expected, self._stiffness, self._slack = slope, stiffness, slack
        self._weight, self._x, self._y, self._xx, self._xy = 0.0, 0.0, 0.0, 0.0, 0.0

    def update(self, size: float, seconds: float, weight: float = 1.0) -> None:
        """Learn from one measurement; outliers are cut."""
        if self._weight > 4.0:
            seconds = min(seconds, 3.0 * self.predict(size) + self._slack)
        keep = _KEEP**weight
        self._weight = self._weight * keep + weight
        self._x = self._x * keep + weight * size
        self._y = self._y * keep + weight * seconds
        self._xx = self._xx * keep + weight * size * size
        self._xy = self._xy * keep + weight * size * seconds

    def line(self) -> tuple[float, float]:
        """Seconds at size 0, and more for each."""
        if not self._weight:
            return 0.0, self._expected
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - x * x
        along = self._xy / self._weight - x * y + self._stiffness * self._expected
        slope = max(0.0, along / (spread + self._stiffness))
        return y - slope * x, slope

    @property
    def is_known(self) -> bool:
        return self._weight > 0.0

    @property
    def ratio(self) -> float:
        """Mean seconds by mean size."""
        return self._y / self._x

    def predict(self, size: float) -> float:
        start, slope = self.line()
        return max(start + slope * size, 0.0)
