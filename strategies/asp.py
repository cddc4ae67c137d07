"""asp: two of every four weights stay zero, the pattern that sparse tensor cores accelerate."""

from __future__ import annotations

from fleet.strategies._base import NOT_YET, Stage, Strategy


class Asp(Strategy):
    """Applies 2:4 sparsity masks after each update."""

    name = "asp"
    meaning = "Keep two of every four weights at zero (2:4 sparsity): the masks are applied again after each update."
    stage = Stage.UPDATE
    after = ("lars", "lamb")  # masks what the final rule has written
    in_ps_job = True
    refused = NOT_YET
    optimizer_effect = "sets the masked weights back to zero after each update"
