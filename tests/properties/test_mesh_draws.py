"""Meshes drawn at random: each trains as one process does, or is refused with the option that does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.meshes import Mesh, train_alone
from tests.properties.mesh_draws import AXES, RULES, Report, draw, judge, run

SMALL, QUICK, MORE, ALL, LARGE = (1, 2, 4), 12, 20, 80, 4
STEPS = 2


def check(report: Report) -> None:
    """Fails with every mesh that is wrong."""
    if report.faults:
        pytest.fail(str(report), pytrace=False)
    assert report.trained > 4 * sum(report.refusals.values()), report


def test_drawn_meshes() -> None:
    check(run(draw(number, 0, SMALL) for number in range(QUICK)))


@pytest.mark.slow
def test_more_drawn_meshes() -> None:
    check(run(draw(number, 0, SMALL) for number in range(QUICK, MORE)))


@pytest.mark.long
def test_all_drawn_meshes() -> None:
    check(run(draw(number, 0, SMALL) for number in range(MORE, ALL)))


@pytest.mark.slow
def test_drawn_meshes_of_eight() -> None:
    check(run(draw(number, 0, (8,)) for number in range(LARGE)))


@pytest.mark.long
def test_more_drawn_meshes_of_eight() -> None:
    check(run(draw(number, 0, (8,)) for number in range(LARGE, 3 * LARGE)))


def test_a_draw_is_a_function_of_its_number_and_the_seed() -> None:
    assert [draw(i, 3, SMALL) for i in range(50)] == [draw(i, 3, SMALL) for i in range(50)]
    assert draw(1, 0, SMALL) != draw(1, 1, SMALL)


def test_the_draws_reach_everything() -> None:
    made = [draw(i, 0, SMALL) for i in range(QUICK, ALL)]
    assert {axis for mesh in made for axis in mesh.degrees} == {*AXES, "ep", "moe_sharding"}
    assert {mesh.world_size for mesh in made} == {*SMALL}
    assert {mesh.micro_batches for mesh in made} == {*range(1, 10)}
    assert {mesh.rule for mesh in made} == {*RULES}
    stages = {mesh.options["sharding_configs"]["stage"] for mesh in made if mesh.options}
    assert stages == {2, 3}
    for field in ("tied", "clip", "virtual", "plain_loop", "norm", "experts", "schedule"):
        assert len({getattr(mesh, field) for mesh in made}) == 2, field
    assert {mesh.merge for mesh in made} == {1, 2, 3}
    assert {mesh.recompute for mesh in made} == {0, 1, 2}


def results_of(mesh: Mesh) -> dict[str, Any]:
    """Returns what one worker of a mesh of one would report."""
    found = train_alone(mesh)
    whole = {key: {name: (t, None) for name, t in found[key].items()} for key in ("gradients", "weights")}
    return {**found, **whole, "row": 0}


@pytest.mark.parametrize("change", [{"clip": 0.1}, {"rule": "adamw"}, {"norm": "rms"}, {"rows": 4}, {"tied": True}])
def test_what_is_wrong_is_found(change: dict[str, Any]) -> None:
    mesh = Mesh({}, steps=STEPS)
    report = Report()
    judge(mesh, (results_of(mesh),), report)
    assert (report.trained, report.faults) == (1, [])
    judge(replace(mesh, **change), (results_of(mesh),), report)
    assert len(report.faults) == 1


def test_a_refusal_comes_from_all_and_names_an_option() -> None:
    report, mesh = Report(), Mesh({"pp": 2}, merge=2)
    refused = {"refused": "gradient_merge and pipeline cannot both be on"}
    judge(mesh, (refused, refused), report)
    assert report.refusals.total() == 1
    judge(mesh, (refused, results_of(Mesh({}, steps=STEPS))), report)
    judge(mesh, ({"refused": "no"}, {"refused": "no"}), report)
    assert ["1 of 2 workers" in report.faults[0], "none of the options" in report.faults[1]] == [True, True]
