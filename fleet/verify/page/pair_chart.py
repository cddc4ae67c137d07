"""Two bars for each tensor as inline SVG: its norm in one process and on the workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 720
_LEFT, _RIGHT, _TOP = 250, 70, 6
_ROW, _BAR = 36, 14
_MOST = 24  # tensors
_LONGEST = 38  # letters of a name


@dataclass(frozen=True)
class TwoNorms:
    """A tensor and its norm in one process and on the workers."""

    name: str
    one: float | None
    many: float | None

    def values(self) -> list[float]:
        """Returns the norms that can be drawn, in order; 0 stands for the others."""
        return [v if v is not None and math.isfinite(v) else 0.0 for v in (self.one, self.many)]


def pair_chart(pairs: Sequence[TwoNorms], *, names: tuple[str, str], label: str, marked: str = "") -> str:
    """Returns a ``<figure>`` with two bars for each of ``pairs``, from zero; ``""`` where nothing can be drawn.

    At most 24 tensors are drawn, around the one whose name ends ``marked``, which is set off.

    Example:
        >>> pair_chart([TwoNorms("0.weight", 2.0, 1.0)], names=("one", "many"), label="Norms").startswith("<figure")
        True
    """
    largest = max((value for pair in pairs for value in pair.values()), default=0.0)
    if not largest:
        return ""
    # Drawn around the tensor of the finding: a model may have thousands.
    at = next((i for i, pair in enumerate(pairs) if marked.endswith(pair.name)), 0)
    begin = max(0, min(at - _MOST // 2, len(pairs) - _MOST))
    shown = pairs[begin : begin + _MOST]
    parts = []
    for row, pair in enumerate(shown):
        top = _TOP + row * _ROW
        style = ' class="marked"' if begin + row == at and marked else ""
        short = pair.name if len(pair.name) <= _LONGEST else f"...{pair.name[3 - _LONGEST :]}"
        title = f"<title>{escape(pair.name)}</title>"
        parts.append(
            f'<text{style} x="{_LEFT - 8}" y="{top + _BAR + 4}" text-anchor="end">{escape(short)}{title}</text>'
        )
        for i, value in enumerate(pair.values()):
            y = top + i * _BAR
            width = value / largest * (WIDTH - _LEFT - _RIGHT)
            parts.append(f'<rect class="bar{i}" x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 1}"/>')
            parts.append(f'<text x="{_LEFT + width + 5:.1f}" y="{y + _BAR - 1}">{value:.4g}</text>')
    left_out = len(pairs) - len(shown)
    more = f", {left_out} more tensors are not shown" if left_out else ""
    legend = "".join(f'<li class="key{i}">{escape(name)}</li>' for i, name in enumerate(names))
    size = f'viewBox="0 0 {WIDTH} {_TOP + _ROW * len(shown)}"'
    return (
        f'<figure><svg {size} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
        f'<figcaption>{escape(label + more)}<ul class="legend">{legend}</ul></figcaption></figure>'
    )
