"""The models against their formulas, and their rules: masks, gates, products, corrections, causality."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fleet
from tests.examples.recommenders.example import example_module
from tests.examples.recommenders.small_models import batch_of, small_net

models = example_module("models")
parts = example_module("models.parts")
tables = example_module("tables")

NAMES = sorted(models.MODELS)
WIDE = fleet.ps.Initializer("normal", 0.0, 0.5)


def made(name: str) -> Any:
    """Returns a small model with rows in this process."""
    torch.manual_seed(0)
    return small_net(name, lambda table, dim: tables.LocalTable(dim, capacity=200, initializer=WIDE))


def shapes(outputs: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(values.shape) for name, values in outputs.items()}


SHAPES = {
    "deepfm": {"click": (8,)},
    "dcn": {"click": (8,)},
    "din": {"click": (8,)},
    "esmm": {"click": (8,), "purchase": (8,)},
    "mmoe": {"click": (8,), "purchase": (8,)},
    "dssm": {"user": (8, 4), "item": (8, 4), "negative": (5, 4)},
    "word2vec": {"pair": (8,), "negative": (8, 3)},
    "sasrec": {"output": (8, 6, 4), "item": (8, 6, 4), "negative": (5, 4)},
}


@pytest.mark.parametrize("name", NAMES)
def test_outputs_have_their_shapes_and_every_weight_a_gradient(name: str) -> None:
    net, batch = made(name), batch_of(name, 1)
    outputs = net(batch)
    assert shapes(outputs) == SHAPES[name]
    net.loss(outputs, batch).backward()
    assert [weight for weight, value in net.named_parameters() if value.grad is None] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_step_lowers_the_loss(name: str) -> None:
    net, batch = made(name), batch_of(name, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    losses = []
    for _ in range(5):
        losses.append(net.loss(net(batch), batch))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]


def test_deepfm_adds_the_product_of_each_pair() -> None:
    net, batch = made("deepfm"), batch_of("deepfm", 1)
    rows, price = net.fields(batch), torch.log1p(batch["price"])[:, None]
    vectors = rows[..., 1:]
    expected = net.linear(price)[:, 0] + net.deep(torch.cat([vectors.flatten(1), price], 1))[:, 0] + rows[..., 0].sum(1)
    for i in range(7):
        for j in range(i):
            expected = expected + (vectors[:, i] * vectors[:, j]).sum(1)
    torch.testing.assert_close(net(batch)["click"], expected)


@pytest.mark.parametrize("rank", [None, 3])
def test_dcn_crosses_the_input_with_itself(rank: int | None) -> None:
    net = models.DCN(partial(_table), dim=4, crosses=2, rank=rank, layers=(8, 4))
    batch = batch_of("dcn", 1)
    start = torch.cat([net.fields(batch).flatten(1), torch.log1p(batch["price"])[:, None]], 1)
    one = start * net.crosses[0](start) + start
    two = start * net.crosses[1](one) + one
    expected = net.out(torch.cat([two, net.deep(start)], 1))[:, 0]
    torch.testing.assert_close(net(batch)["click"], expected)
    ranks = [torch.linalg.matrix_rank(_whole(cross)) for cross in net.crosses]
    assert ranks == [29 if rank is None else rank] * 2


def _table(name: str, dim: int) -> nn.Module:
    return tables.LocalTable(dim, capacity=200, initializer=WIDE)


def _whole(cross: nn.Module) -> Tensor:
    return cross.weight if isinstance(cross, nn.Linear) else cross[1].weight @ cross[0].weight


def din_histories(batch: dict[str, Tensor], histories: list[list[int]]) -> dict[str, Tensor]:
    """Returns the batch with these histories."""
    flat = torch.tensor([one for history in histories for one in history], dtype=torch.int64)
    lengths = torch.tensor([len(history) for history in histories])
    starts = lengths.cumsum(0) - lengths
    own = {"history": flat, "history_category": flat * 3, "history.offsets": starts}
    return {**batch, **own, "history_category.offsets": starts}


@pytest.mark.parametrize("name", ["din", "dssm"])
def test_padding_and_the_histories_of_others_change_nothing(name: str) -> None:
    net, batch = made(name), batch_of(name, 1, size=3)
    output = "click" if name == "din" else "user"
    found = net(din_histories(batch, [[5, 6], [], [7]]))[output]
    padded = net(din_histories(batch, [[5, 6, 0], [0, 0], [7, 0, 0]]))[output]
    torch.testing.assert_close(padded, found)
    others = net(din_histories(batch, [[5, 6], [8, 9, 10], []]))[output]
    torch.testing.assert_close(others[0], found[0])
    assert not torch.allclose(others[2], found[2])


def test_din_sums_rows_by_the_weights_of_its_network() -> None:
    net, batch = made("din"), din_histories(batch_of("din", 1, size=2), [[5, 6], [7]])
    rows = net.fields(batch)
    target, seen = rows[:, 1:3].flatten(1), rows.new_zeros(2, 8)
    for sample, history in enumerate([[5, 6], [7]]):
        for item in history:
            row = torch.cat(
                [net.fields.tables["item"](torch.tensor(item)), net.fields.tables["category"](torch.tensor(item * 3))]
            )
            own = target[sample]
            seen[sample] += net.attention(torch.cat([row, own, row - own, row * own])) * row
    inputs = [rows.flatten(1), seen, seen * target, torch.log1p(batch["price"])[:, None]]
    torch.testing.assert_close(net(batch)["click"], net.deep(torch.cat(inputs, 1))[:, 0])


def test_esmm_multiplies_click_and_conversion() -> None:
    net, batch = made("esmm"), batch_of("esmm", 1)
    inputs = torch.cat([net.fields(batch).flatten(1), torch.log1p(batch["price"])[:, None]], 1)
    click, conversion = torch.sigmoid(net.click(inputs))[:, 0], torch.sigmoid(net.conversion(inputs))[:, 0]
    outputs = net(batch)
    torch.testing.assert_close(torch.sigmoid(outputs["click"]), click)
    torch.testing.assert_close(torch.sigmoid(outputs["purchase"]), click * conversion)
    expected = nn.functional.binary_cross_entropy(click, batch["click"])
    expected = expected + nn.functional.binary_cross_entropy(click * conversion, batch["click"] * batch["purchase"])
    torch.testing.assert_close(net.loss(outputs, batch), expected)


def test_esmm_keeps_small_probabilities() -> None:
    net, batch = made("esmm"), batch_of("esmm", 1)
    with torch.no_grad():
        net.conversion[-1].bias -= 60
    assert net(batch)["purchase"].max() < -50
    assert torch.isfinite(net.loss(net(batch), batch))


def test_mmoe_mixes_experts_by_the_gate_of_the_task() -> None:
    net, batch = made("mmoe"), batch_of("mmoe", 1)
    inputs = torch.cat([net.fields(batch).flatten(1), torch.log1p(batch["price"])[:, None]], 1)
    for task in ("click", "purchase"):
        shares = net.gates[task](inputs).softmax(1)
        mixed = sum(shares[:, [number]] * expert(inputs) for number, expert in enumerate(net.experts))
        torch.testing.assert_close(net(batch)[task], net.towers[task](mixed)[:, 0])


def dssm_loss(batch: dict[str, Tensor], user: Tensor, candidates: Tensor, ids: Tensor, log_q: Tensor) -> Tensor:
    """The loss of Yi et al. 2019, one sample at a time."""
    losses = []
    for row in range(len(user)):
        kept = [column for column in range(len(ids)) if column == row or ids[column] != batch["item"][row]]
        scores = candidates[kept] @ user[row] / 0.1 - log_q[kept]
        losses.append(torch.logsumexp(scores, 0) - scores[kept.index(row)])
    return (torch.stack(losses) * batch["click"]).sum() / batch["click"].sum()


def test_dssm_corrects_by_log_q_and_leaves_the_same_item_out() -> None:
    net, batch = made("dssm"), batch_of("dssm", 1)
    batch["item"][1] = batch["item"][0]
    batch["negative.item"][0] = batch["item"][2]
    outputs = net(batch)
    ids, log_q = (
        torch.cat([batch["item"], batch["negative.item"]]),
        torch.cat([batch["log_q"], batch["negative.log_q"]]),
    )
    candidates = torch.cat([outputs["item"], outputs["negative"]])
    expected = dssm_loss(batch, outputs["user"], candidates, ids, log_q)
    torch.testing.assert_close(net.loss(outputs, batch), expected)


def test_dssm_takes_the_items_of_the_batch_alone_or_sampled_ones_alone() -> None:
    net, batch = made("dssm"), batch_of("dssm", 1)
    outputs = net(batch)
    alone = {name: values for name, values in outputs.items() if name != "negative"}
    expected = dssm_loss(batch, outputs["user"], outputs["item"], batch["item"], batch["log_q"])
    torch.testing.assert_close(net.loss(alone, batch), expected)
    net.in_batch = False
    changed = {**batch, "log_q": batch["log_q"].clone()}
    changed["click"] = torch.eye(8)[0]
    before = net.loss(outputs, changed)
    changed["log_q"][1:] += 5.0
    torch.testing.assert_close(net.loss(outputs, changed), before)


def test_both_towers_of_dssm_read_one_table_of_items() -> None:
    net = made("dssm")
    assert net.user_tower.items is net.item_tower.fields.tables["item"]
    assert net.of_users(batch_of("dssm", 1)).norm(dim=1).tolist() == pytest.approx([1] * 8)


def test_word2vec_reads_one_table_on_both_sides() -> None:
    net, batch = made("word2vec"), batch_of("word2vec", 1)
    assert [name for name, _ in net.named_parameters()] == ["items.weight"]
    turned = {**batch, "centre": batch["context"], "context": batch["centre"]}
    torch.testing.assert_close(net(turned)["pair"], net(batch)["pair"])
    centre, negative = net.items(batch["centre"]), net.items(batch["negative"])
    torch.testing.assert_close(net(batch)["negative"], (centre[:, None] * negative).sum(2))


def test_sasrec_sees_no_later_item_and_no_padding() -> None:
    net, batch = made("sasrec"), batch_of("sasrec", 1)
    items = torch.arange(1, 7)[None]
    other = torch.tensor([[1, 2, 3, 9, 9, 0]])
    one, two = (net.encoded(net.items(ids)) for ids in (items, other))
    torch.testing.assert_close(two[:, :3], one[:, :3])
    assert not torch.allclose(two[:, 3], one[:, 3])
    shorter = {**batch, "items": torch.tensor([[4, 5, 0, 0]])}
    longer = {**batch, "items": torch.tensor([[4, 5, 0, 0, 0, 0]])}
    torch.testing.assert_close(net.loss(net(longer), longer), net.loss(net(shorter), shorter))


def test_sasrec_ranks_by_the_output_at_the_last_item_of_a_history() -> None:
    net = made("sasrec")
    batch = {"history": torch.tensor([1, 2, 3, 4]), "history.offsets": torch.tensor([0, 3])}
    expected = [net.encoded(net.items(torch.tensor([ids])))[0, -1] for ids in ([1, 2, 3], [4])]
    torch.testing.assert_close(net.of_users(batch), torch.stack(expected))


def test_flat_ids_become_rectangles_and_means() -> None:
    flat, offsets = torch.tensor([7, 8, 9, 5]), torch.tensor([0, 3, 3])
    assert parts.owners(flat, offsets).tolist() == [0, 0, 0, 2]
    assert parts.padded(flat, offsets, 2).tolist() == [[8, 9], [0, 0], [5, 0]]
    assert parts.padded(flat, offsets, 5).tolist() == [[7, 8, 9, 0, 0], [0] * 5, [5, 0, 0, 0, 0]]
    rows = torch.tensor([[1.0], [3.0], [8.0], [2.0]])
    assert parts.mean_rows(rows, torch.tensor([7, 8, 0, 5]), offsets).tolist() == [[2.0], [0.0], [2.0]]
