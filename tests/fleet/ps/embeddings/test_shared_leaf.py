"""Gradients of features that share a leaf: each feature has its own, as alone."""

from __future__ import annotations

import gc
import weakref

import torch

from tests.fleet.ps.embeddings.features import TABLES, batch, both, compare, draw, is_equal


def test_a_feature_whose_result_is_not_used_has_no_gradient() -> None:
    made, alone = both()
    ids = batch()
    for results in (made(ids), {name: module(ids[name]) for name, module in alone.items()}):
        (results["item"].sum() + results["words"].square().sum()).backward()
    for name in TABLES:
        assert made[name].lookup.has_gradients() == alone[name].lookup.has_gradients() == (name in ("item", "words"))
        assert is_equal(made[name].lookup.take(), alone[name].lookup.take())


def test_gradients_of_several_forwards_add_up() -> None:
    made, alone = both()
    for seed in range(3):
        ids = batch(seed)
        for results in (made(ids), {name: module(ids[name]) for name, module in alone.items()}):
            sum(rows.sum() * (seed + 1) for rows in results.values()).backward()
    for name in TABLES:
        assert is_equal(made[name].lookup.take(), alone[name].lookup.take())


def test_a_second_backward_of_one_graph_adds_up() -> None:
    made, alone = both()
    ids = batch()
    for results in (made(ids), {name: module(ids[name]) for name, module in alone.items()}):
        (results["user"].sum() * 3).backward(retain_graph=True)
        (results["user"].sum() + results["item"].sum()).backward()
    for name in TABLES:
        assert is_equal(made[name].lookup.take(), alone[name].lookup.take())


def test_gradients_of_one_feature_are_dropped_alone() -> None:
    made, alone = both()
    ids = batch()
    for modules, results in ((made, made(ids)), (alone, {name: module(ids[name]) for name, module in alone.items()})):
        total = results["user"].sum() * 3 + results["item"].sum()
        total.backward(retain_graph=True)
        modules["user"].lookup.drop()
        assert not modules["user"].lookup.has_gradients()
        assert modules["item"].lookup.has_gradients()
        total.backward()
    for name in TABLES:
        assert is_equal(made[name].lookup.take(), alone[name].lookup.take())


def test_results_may_be_changed_in_place() -> None:
    made, alone = both()
    ids = batch()
    for results in (made(ids), {name: module(ids[name]) for name, module in alone.items()}):
        kept = results["item"] * results["wide"].sum()  # needs the rows of item for its backward
        results["user"].mul_(2.0).relu_()
        results["words"][1:] = 0.0
        (kept.sum() + results["user"].sum() + results["words"].sum()).backward()
    for name in TABLES:
        assert is_equal(made[name].lookup.take(), alone[name].lookup.take())


def test_gradients_of_gradients() -> None:
    made, alone = both({"user": 4, "item": 4})
    ids = {"user": draw(6), "item": draw(6, seed=1)}
    for results in (made(ids), {name: module(ids[name]) for name, module in alone.items()}):
        loss = (results["user"] * results["item"]).pow(3).sum()
        (of_user,) = torch.autograd.grad(loss, results["user"], create_graph=True)
        (loss + of_user.square().sum()).backward()
    for name in alone:
        assert is_equal(made[name].lookup.take(), alone[name].lookup.take())


def test_amp_changes_nothing() -> None:
    made, alone = both()
    with torch.autocast("cpu", torch.bfloat16):
        compare(made, alone, batch())


def test_gradients_count_once_per_sample_where_the_table_says_so() -> None:
    made, alone = both()
    for modules in (made, alone):
        for name in ("user", "total"):
            modules[name]._scales = True
    compare(made, alone, batch())


def test_a_graph_that_is_let_go_frees_its_rows() -> None:
    made, _ = both({"user": 4, "item": 4})
    gc.disable()
    try:
        found = made({"user": draw(6), "item": draw(6)})
        (found["user"].sum() + found["item"].sum()).backward()
        (part, _), *_ = made["user"].lookup._ready
        gradient = weakref.ref(part._gradient._tensor)
        for module in made.children():
            module.lookup.take()
        del found, part
        assert gradient() is None
    finally:
        gc.enable()
