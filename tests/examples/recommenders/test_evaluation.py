"""AUC and recall on the test day, beside popularity and the true probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fleet
from tests.examples.recommenders.example import example_module
from tests.helpers.scikit_learn import roc_auc_score

evaluation = example_module("evaluation")
feeds = example_module("feeds")
catalogue = example_module("catalogue")
CPU = torch.device("cpu")


class Knows(nn.Module):
    """Predicts clicks by their true probability, and purchases by the price."""

    TASKS = ("click", "purchase")
    INPUTS = ("item", "p_click", "price")

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"click": torch.logit(batch["p_click"]), "purchase": -batch["price"] / 50}


class Ranks(nn.Module):
    """Gives every user the same vector, so that items are ranked by their numbers."""

    USER_INPUTS = ("user",)
    ITEM_INPUTS = ("item",)

    def __init__(self, numbers: dict[int, float]) -> None:
        super().__init__()
        self.numbers = numbers

    def of_users(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.ones(len(batch["user"]), 1)

    def of_items(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor([[self.numbers[item]] for item in batch["item"].tolist()])


@pytest.fixture(autouse=True)
def job() -> Any:
    fleet.init(is_collective=True, log_level="ERROR")


def whole_day(folder: Path, *columns: str) -> dict[str, Tensor]:
    parts = list(feeds.held_out(folder, ("item", "price", *columns)))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0] if "." not in name}


def test_auc_is_that_of_all_samples_beside_the_best(folder: Path) -> None:
    found = evaluation.evaluate(Knows(), folder, CPU)
    day = whole_day(folder)
    assert found["auc_click"]["model"] == pytest.approx(roc_auc_score(day["click"], day["p_click"]), abs=2e-5)
    assert found["auc_click"]["best"] == pytest.approx(found["auc_click"]["model"], abs=2e-5)
    assert found["auc_purchase"]["model"] == pytest.approx(roc_auc_score(day["purchase"], -day["price"]), abs=2e-4)
    both = day["p_click"] * day["p_purchase"]
    assert found["auc_purchase"]["best"] == pytest.approx(roc_auc_score(day["purchase"], both), abs=2e-5)
    assert 0.5 < found["auc_click"]["popularity"] < found["auc_click"]["best"]


def test_recall_counts_clicked_items_among_the_first_of_those_on_sale(folder: Path) -> None:
    shop = catalogue.Catalogue.read(folder)
    places = shop.on_sale(shop.last_day)
    by_clicks = dict(zip(shop.item.tolist(), shop.clicked(torch.arange(len(shop.item))).tolist(), strict=True))
    numbers = {item: count + 1e-6 * place for place, (item, count) in enumerate(by_clicks.items())}
    found = evaluation.evaluate(Ranks(numbers), folder, CPU)["recall@50"]
    clicked = whole_day(folder, "user")
    wanted = clicked["item"][clicked["click"] == 1]
    on_sale = shop.item[places].tolist()
    first = sorted(on_sale, key=lambda item: -numbers[item])[: evaluation.TOP]
    assert found["model"] == pytest.approx(sum(item in first for item in wanted.tolist()) / len(wanted), abs=1e-6)
    assert found["popularity"] == pytest.approx(found["model"], abs=0.02)
