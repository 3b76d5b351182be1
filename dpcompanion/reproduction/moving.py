r"""A histogram that moves: a bar chart for each of some times in a run, and a slider between them.

The picture is inline SVG, drawn at its last time, so that it is complete where no script runs;
`book/_static/moving.js` shows the slider, a native one, and redraws the bars. Words that the slider
needs are written here, for every time.

>>> MovingHistogram(
...     {"epoch 1": [0.1, 0.2, 0.2], "epoch 2": [0.3, 0.4, 0.9]},
...     {"epoch 1": 0.5, "epoch 2": 1.0},
...     bins=4,
...     alt="Two epochs.",
...     caption="Three digits.",
... )
epoch 1: uniform 0.5, median 0.2, 3 values
epoch 2: uniform 1, median 0.4, 3 values
"""

import html
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from dpcompanion import _checks

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 270, 14, 14, 30, 54


class MovingHistogram:
    """Histograms of individual epsilons at some times in a run, the uniform epsilon beside them.

    Args:
        times: the name of each time -> epsilons, (n,); all with the same bins and the same axes.
        uniform: the name of each time -> the uniform epsilon.
        bins: how many bars, from 0 to a little beyond the last uniform epsilon.
        alt: what the picture shows, for those who do not see it.
        caption: words below it.
        unit: what an epsilon is of, in the plural.

    Raises:
        ValueError: no time, or times that differ; epsilons that are negative, not finite, or above
            the uniform epsilon.
    """

    def __init__(
        self,
        times: Mapping[str, Any],
        uniform: Mapping[str, float],
        *,
        bins: int = 40,
        alt: str,
        caption: str,
        unit: str = "digits",
    ):
        self.times = {name: np.asarray(values, dtype=np.float64) for name, values in times.items()}
        self.uniform = {name: float(uniform[name]) for name in self.times if name in uniform}
        _checks.whole_number("bins", bins, 1)
        if not self.times or list(uniform) != list(self.times):
            raise ValueError(f"uniform must have the times {list(self.times)}, got {list(uniform)}")
        for name, values in self.times.items():
            if not (
                len(values)
                and (values >= 0).all()
                and (values <= self.uniform[name] * (1 + 1e-9)).all()
            ):
                raise ValueError(
                    f"times[{name!r}] must hold epsilons from 0 to the uniform "
                    f"{self.uniform[name]:g}"
                )
        self.end = 1.06 * max(self.uniform.values())
        self.edges = np.linspace(0, self.end, bins + 1)
        self.counts = {
            name: np.histogram(values, self.edges)[0] for name, values in self.times.items()
        }
        self.alt, self.caption, self.unit = alt, caption, unit

    def __repr__(self) -> str:
        return "\n".join(
            f"{name}: uniform {self.uniform[name]:.3g}, median {np.median(values):.3g}, "
            f"{len(values)} values"
            for name, values in self.times.items()
        )

    def said(self, name: str) -> str:
        """The time in words.

        >>> MovingHistogram({"a": [0.1]}, {"a": 0.5}, bins=2, alt="", caption="").said("a")
        'a: the uniform epsilon is 0.50, the median of the digits 0.10'
        """
        return (
            f"{name}: the uniform epsilon is {self.uniform[name]:.2f}, the median of the "
            f"{self.unit} {np.median(self.times[name]):.2f}"
        )

    def _repr_html_(self) -> str:
        last, floor = list(self.times)[-1], HEIGHT - BOTTOM
        # A height of 1 is that of the tallest bar of its time: early ones are narrow, and would
        # dwarf the others.
        frames = [
            {
                "said": self.said(name),
                "uniform": round(self._across(self.uniform[name]), 2),
                "bars": [round(int(count) / int(counts.max()), 4) for count in counts],
            }
            for name, counts in self.counts.items()
        ]
        data = html.escape(json.dumps({"frames": frames, "height": floor - TOP, "base": floor}))
        width, full = self._across(self.edges[1]) - self._across(0) - 1, floor - TOP
        bars = "".join(
            f'<rect x="{self._across(edge) + 0.5:.2f}" width="{width:.2f}" '
            f'y="{floor - full * share:.2f}" height="{full * share:.2f}"></rect>'
            for edge, share in zip(self.edges, frames[-1]["bars"])
        )
        ticks = "".join(
            f'<text x="{self._across(tick):.2f}" y="{floor + 20}" text-anchor="middle">'
            f"{tick:g}</text>"
            for tick in np.arange(0, self.end, _round(self.end / 6))
        )
        return "\n".join(
            [
                f'<figure class="moving" data-moving="{data}">',
                f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
                f'aria-label="{html.escape(self.alt)}">',
                f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" '
                f'y1="{floor}" y2="{floor}"></line>{ticks}',
                f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">'
                f"epsilon of one of the {self.unit}</text>",
                f'<g class="bars">{bars}</g>',
                f'<g class="uniform" transform="translate({frames[-1]["uniform"]} 0)">',
                f'<line y1="{TOP - 8}" y2="{floor}"></line>',
                f'<text x="6" y="{TOP - 14}" text-anchor="end">uniform</text></g>',
                "</svg>",
                '<p class="control" hidden><label>Drag through the run ',
                f'<input type="range" min="0" max="{len(frames) - 1}" step="1" '
                f'value="{len(frames) - 1}"></label></p>',
                f'<p class="said">{html.escape(self.said(last))}</p>',
                f"<figcaption>{html.escape(self.caption)}</figcaption>",
                "</figure>",
            ]
        )

    def _across(self, epsilon: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * float(epsilon) / self.end


def _round(rough: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is not below `rough`.

    >>> _round(0.53), _round(0.2), _round(7)
    (1.0, 0.2, 10.0)
    """
    power = 10.0 ** np.floor(np.log10(rough))
    return float(
        next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    )
