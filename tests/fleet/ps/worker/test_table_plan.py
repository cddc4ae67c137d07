"""Every worker and server works out the same tables from model and optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fleet
from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.ps.embeddings.embedding import SparseEmbedding
from fleet.ps.embeddings.served_embedding import ServedEmbedding, check_embeddings, serve_embeddings
from fleet.ps.table.dense_table import DenseTableConfig
from fleet.ps.table.ids import copy_for_others
from fleet.ps.worker.dense_part import DensePart, GroupPlace
from fleet.ps.worker.table_configs import configure_table
from fleet.ps.worker.table_plan import plan_tables


class Towers(nn.Module):
    def __init__(self, **second: Any) -> None:
        super().__init__()
        self.user = SparseEmbedding(4, "ids")
        self.item = SparseEmbedding(4, **{"name": "ids", **second})
        self.words = nn.Embedding(5, 3, sparse=True)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.out = nn.Linear(3, 1)


def planned(model: nn.Module, optimizer: Any = None, **settings: Any) -> Any:
    serve_embeddings(model)
    return plan_tables([model], optimizer or torch.optim.Adam(model.parameters(), 0.01), **settings)


def test_modules_with_one_name_share_a_table_and_groups_are_dense_tables() -> None:
    model = Towers()
    groups = [
        {"params": [*model.user.parameters(), *model.item.parameters(), *model.words.parameters()], "lr": 0.5},
        {"params": [model.out.weight]},
        {"params": [model.out.bias], "lr": 0.25},
    ]
    plan = planned(model, torch.optim.SGD(groups, 0.125))
    assert [(part.config.name, len(part.modules)) for part in plan.sparse] == [("ids", 2), ("words", 1)]
    assert [(part.config.name, part.config.size) for part in plan.dense] == [("dense.1", 3), ("dense.2", 1)]
    assert [(part.config.shapes, part.config.names) for part in plan.dense] == [
        (((1, 3),), ("out.weight",)),
        (((1,),), ("out.bias",)),
    ]
    assert sorted(plan.configs) == [0, 1, 2, 3]
    assert [config.rule["learning_rate"] for config in plan.configs.values()] == [0.5, 0.5, 0.125, 0.25]
    assert plan.ids_of(["words"]) == [1]
    with pytest.raises(ConfigError, match="not a sparse table"):
        plan.ids_of(["out"])


def test_a_dense_table_knows_the_shapes_of_what_it_holds() -> None:
    """In the order of the group, tied weights once, neither frozen nor empty ones; a stray parameter has no name."""
    model = nn.Module()
    model.a, model.b = nn.Linear(2, 3, bias=False), nn.Linear(2, 3)
    model.b.weight = model.a.weight
    model.scale, model.none = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(0, 4))
    model.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
    stray = nn.Parameter(torch.ones(2, 2))
    (part,) = planned(model, torch.optim.SGD([stray, *model.parameters()], 0.1)).dense
    assert part.config.shapes == ((2, 2), (), (3, 2), (3,))
    assert part.config.names == ("", "scale", "a.weight", "b.bias")


def test_dense_values_and_gradients_are_flat_and_come_back() -> None:
    model = Towers()
    part = planned(model).dense[0]
    values = part.values()
    assert values.tolist() == [*model.out.weight.flatten().tolist(), *model.out.bias.tolist()]
    assert part.gradients() is None
    model.out.bias.sum().backward()
    assert part.gradients().tolist() == [0, 0, 0, 1]
    total = np.arange(4, dtype=np.float32)
    part.add_gradients(total)
    assert total.tolist() == [0, 1, 2, 4]
    other = np.zeros(4, np.float32)
    for one in (total, other, total):
        part.add_gradients(one)
    assert total.tolist() == [0, 1, 2, 6]
    assert other.tolist() == [0, 0, 0, 1]
    part.assign(np.arange(4, dtype=np.float32))
    assert model.out.weight.tolist() == [[0, 1, 2]]
    assert model.out.bias.tolist() == [3]
    memory = np.empty(4, np.float32)
    assert part.gradients(memory) is memory
    assert memory.tolist() == [0, 0, 0, 1]
    assert part.values(memory) is memory
    assert memory.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("skew", range(0, 64, 12))
@pytest.mark.parametrize("odd", ["none", "absent", "strided", "negated", "double", "sparse"])
def test_gradients_for_another_process_are_the_same_numbers(skew: int, odd: str) -> None:
    """Large ones are copied past the caches, wherever they begin; what is not plain goes the other way."""
    parameters = [torch.nn.Parameter(torch.empty(shape)) for shape in ((263, 257), (3,), (0, 5), (1,), (40, 30))]
    if odd == "double":
        parameters[1] = torch.nn.Parameter(torch.empty(3, dtype=torch.float64))
    for p in parameters:
        p.grad = torch.randn(p.shape, dtype=p.dtype)
    last = parameters[4]
    if odd == "absent":
        last.grad = None
    elif odd == "strided":
        last.grad = torch.randn(30, 40).t()
    elif odd == "negated":
        last.grad = torch._neg_view(torch.randn(40, 30))
        assert last.grad.is_neg()
    elif odd == "sparse":
        last.grad = torch.eye(40, 30).to_sparse()
    size = sum(p.numel() for p in parameters)
    part = DensePart(0, DenseTableConfig("dense", size), parameters, GroupPlace(None, 0))
    memory = np.full(size + 64, 7, np.float32)
    out = memory[skew : skew + size]
    assert part.gradients(out, for_others=True) is out
    np.testing.assert_array_equal(out, part.gradients())
    assert (np.delete(memory, np.s_[skew : skew + size]) == 7).all()


def test_room_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 arrays of 5 numbers do not fill 4 places"):
        copy_for_others([0, 0], [3, 2], np.empty(4, np.float32))


@pytest.mark.gpu
def test_parameters_of_several_devices() -> None:
    model = Towers()
    model.out.bias.data = model.out.bias.data.cuda()
    part = planned(model).dense[0]
    part.assign(np.arange(4, dtype=np.float32))
    assert (model.out.weight.device.type, model.out.bias.device.type) == ("cpu", "cuda")
    assert part.values().tolist() == [0, 1, 2, 3]
    model.out.bias.sum().backward()
    assert part.gradients().tolist() == [0, 0, 0, 1]
    total = np.zeros(4, np.float32)
    part.add_gradients(total)
    assert total.tolist() == [0, 0, 0, 1]


def test_the_share_of_one_server_goes_to_its_places_whatever_parameters_it_cuts() -> None:
    model = Towers()
    model.out.weight = torch.nn.Parameter(torch.arange(12.0).view(4, 3)[:, :2].T)  # strides that are not its shape's
    part = DensePart(0, DenseTableConfig("dense", 9), [model.out.weight, model.out.bias], GroupPlace(None, 0))
    for values, start in (([10, 11, 12], 0), ([13, 14, 15, 16], 3), ([17, 18], 7)):
        part.assign(np.array(values, np.float32), start)
    assert model.out.weight.tolist() == [[10, 11, 12, 13], [14, 15, 16, 17]]
    assert model.out.bias.tolist() == [18]


def test_all_values_at_once_are_those_of_pieces_and_autograd_sees_the_change() -> None:
    model = Towers()
    model.out.weight = torch.nn.Parameter(torch.zeros(3, 4)[:, :2].T)
    part = DensePart(0, DenseTableConfig("dense", 7), [model.out.weight, model.out.bias], GroupPlace(None, 0))
    used = (model.out.weight * model.out.weight).sum()
    part.assign(np.arange(7, dtype=np.float32))
    assert model.out.weight.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert model.out.bias.tolist() == [6]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        used.backward()
    pieces = np.random.default_rng(0).standard_normal(7).astype(np.float32)
    part.assign(pieces)
    whole = [p.detach().clone() for p in part.parameters]
    part.assign(pieces[:4])
    part.assign(pieces[4:], 4)
    assert all(torch.equal(p, q) for p, q in zip(part.parameters, whole, strict=True))


def test_modules_that_describe_a_table_differently_are_refused() -> None:
    for other in ({"dim": 5}, {"seed": 1}, {"entry": fleet.CountFilterEntry(2)}):
        model = Towers()
        model.item = SparseEmbedding(**{"dim": 4, "name": "ids", **other})
        with pytest.raises(ConfigError, match=f"item and another .* describe it differently \\({next(iter(other))}\\)"):
            planned(model)
    model = Towers()
    groups = [
        {"params": [*model.user.parameters(), *model.out.parameters()]},
        {"params": model.item.parameters(), "lr": 1.0},
    ]
    with pytest.raises(ConfigError, match="'ids' is shared by modules in two parameter groups"):
        planned(model, torch.optim.SGD(groups, 0.1))
    with pytest.raises(ConfigError, match="does not hold user.weight"):
        planned(model, torch.optim.SGD(model.out.parameters(), 0.1))
    with pytest.raises(ConfigError, match="tables hold float32"):
        planned(Towers().double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rows_of_another_dtype_than_the_tables_are_refused(dtype: torch.dtype) -> None:
    model = Towers()
    model.user.to(dtype)
    with pytest.raises(ConfigError, match=f"user.weight is {dtype}.*tables hold float32"):
        planned(model)


def test_geo_and_adam_d2sum() -> None:
    """D.3: adam_d2sum takes Adam's place in dense tables only; geo tables add."""
    plan = planned(Towers(), adam_d2sum=True)
    assert [part.config.rule.name for part in (*plan.sparse, *plan.dense)] == ["adam", "adam", "adam_d2sum"]
    model = Towers()
    with pytest.raises(ConfigError, match="replaces Adam"):
        planned(model, torch.optim.SGD(model.parameters(), 0.1), adam_d2sum=True)
    model = Towers()
    plan = planned(model, torch.optim.SGD(model.parameters(), 0.1), geo=True)
    assert {config.rule.name for config in plan.configs.values()} == {"sum"}
    model = Towers(name="other", entry=fleet.ProbabilityEntry(0.5))
    with pytest.raises(ConfigError, match="geo training"):
        planned(model, torch.optim.SGD(model.parameters(), 0.1), geo=True)


def test_adam_d2sum_keeps_the_decay() -> None:
    """D.3: the user's weight decay is added to the gradient there too."""
    model = Towers()
    plan = planned(model, torch.optim.Adam(model.parameters(), 0.5, weight_decay=0.25), adam_d2sum=True)
    rule = plan.dense[0].config.rule
    assert (rule.name, rule["learning_rate"], rule["weight_decay"]) == ("adam_d2sum", 0.5, 0.25)


def test_a_rate_is_the_optimizers_unless_the_table_has_one_of_its_own() -> None:
    """D.4: bounds leave the optimizer's rate in force; a rate for half of the columns cannot follow a schedule."""

    def rate_after(lr: float, **settings: Any) -> float | None:
        model = Towers()
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        part = planned(model, optimizer, configure=lambda c: configure_table(c, settings if c.name == "ids" else None))
        optimizer.param_groups[0].update(initial_lr=0.5, lr=lr)
        found: float | None = part.sparse[0].rate()
        return found

    assert rate_after(0.25) == rate_after(0.25, weight_bounds=[-1, 1]) == rate_after(0.25, delta_keep_days=3) == 0.25
    assert rate_after(0.25, learning_rate=0.5) is rate_after(0.25, sparse_optimizer="adagrad") is None
    assert rate_after(0.25, embed_learning_rate=0.1, embedx_learning_rate=0.2) is None
    assert rate_after(0.5, embed_learning_rate=0.1) is None
    with pytest.raises(ConfigError, match="Give both a rate, or neither"):
        rate_after(0.25, embed_learning_rate=0.1)


def test_groups_are_those_that_the_optimizer_has_now() -> None:
    """D.3: load_state_dict puts new dictionaries in their place, and a scheduler writes to those."""
    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    plan = planned(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.125
    assert [part.rate() for part in (*plan.sparse, *plan.dense)] == [0.125] * 3


def test_a_gradient_without_a_table_is_refused() -> None:
    """001-10: a parameter that is unfrozen or added later would never be trained."""
    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.5)
    plan = planned(model, optimizer)
    plan.check_trained()
    model.frozen.weight.grad = torch.zeros(2, 2)
    with pytest.raises(ConfigError, match="no table"):
        plan.check_trained()
    model.frozen.weight.grad = None
    model.out.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="keep moving it"):
        plan.check_trained()


def test_a_hyper_parameter_that_changes_is_refused() -> None:
    """D.3: the servers keep the rule of the start; a schedule that cycles the momentum would be ignored."""
    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.5)
    plan = planned(model, optimizer)
    optimizer.param_groups[0].update(lr=0.25, initial_lr=1.0)
    plan.check_trained()
    optimizer.param_groups[0]["momentum"] = 0.25
    with pytest.raises(ConfigError, match="'momentum' of parameter group 0 has become 0.25"):
        plan.check_trained()
    hybrid = planned(
        model, torch.optim.SGD([{"params": model.out.parameters()}, *_rows_of(model)], 0.5), dense_here=True
    )
    assert sorted(hybrid.planned) == [1], "workers train the dense groups by themselves"


def _rows_of(model: Towers) -> list[dict[str, Any]]:
    return [{"params": [model.user.weight, model.item.weight, model.words.weight]}]


def test_a_table_of_two_groups_is_refused() -> None:
    """D.3: it has one learning rate."""
    model = Towers()
    groups = [{"params": [model.user.weight]}, {"params": [model.item.weight, *model.words.parameters()]}]
    with pytest.raises(ConfigError, match="one learning rate"):
        planned(model, torch.optim.SGD(groups, 0.5))


def test_a_frozen_module_of_a_shared_table_leaves_the_other_trained() -> None:
    """D.1: frozen rows take no gradients, through whichever module they are read."""

    class Ones:
        trains = True
        asked = 0

        def rows(self, keys: Any) -> Any:
            return np.ones((len(keys), 4), np.float32)

    model = Towers()
    model.user.weight.requires_grad_(False)
    part = planned(model).sparse[0]
    assert part.group is not None
    for module in part.modules:
        module.lookup.source = Ones()
    (model.user(torch.tensor([7])) + model.item(torch.tensor([8]))).sum().backward()
    assert [module.lookup.has_gradients() for module in part.modules] == [False, True]


def test_served_embeddings_begin_with_their_own_weights() -> None:
    """D.4: a range of initial weights would be added to them; their shows are counted."""

    def configured(**settings: Any) -> Any:
        return planned(Towers(), configure=lambda c: configure_table(c, settings if c.name == "words" else None))

    for settings in ({"initial_range": 0.5}, {"sparse_accessor_class": "CtrCommonAccessor"}):
        with pytest.raises(ConfigError, match="its own initial weights"):
            configured(**settings)
    lookup = configured(sparse_optimizer="adagrad").sparse[1].modules[0].lookup

    class Ones:
        trains = True
        asked = 0

        def rows(self, keys: Any) -> Any:
            return np.ones((len(keys), 3), np.float32)

    lookup.source = Ones()
    lookup.find(np.array([4, 4, 2]), torch.device("cpu"))[0].sum().backward()
    assert lookup.take().shows.tolist() == [2, 1]


def test_served_embeddings_are_plain_until_they_are_connected() -> None:
    model = Towers()
    ids, plain = torch.tensor([[1, 4], [0, 1]]), nn.Embedding(5, 3, sparse=True)
    plain.load_state_dict(model.words.state_dict())
    names = [name for name, _ in model.named_parameters()]
    serve_embeddings(model)
    assert isinstance(model.words, ServedEmbedding)
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.equal(model.words(ids), plain(ids))
    pieces = model.words.initial_rows()
    assert pieces[0][0].tolist() == [0, 1, 2, 3, 4]

    class Source:
        trains = True
        asked = 0

        def rows(self, keys: Any) -> Any:
            return pieces[0][1][keys] + 1

    model.words.lookup.source = Source()
    assert torch.equal(model.words(ids), plain(ids) + 1)
    with pytest.raises(IndexError, match="there are 5 rows"):
        model.words(torch.tensor([5]))
    model.words.refresh()
    assert torch.equal(model.words.weight, plain.weight + 1)


def test_embeddings_that_cannot_be_served_are_refused() -> None:
    tied = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 4, bias=False))
    tied[1].weight = tied[0].weight
    with pytest.raises(ConfigError, match="same parameter"):
        check_embeddings(tied)
    with pytest.raises(UnsupportedOptionError, match="EmbeddingBag"):
        check_embeddings(nn.Sequential(nn.EmbeddingBag(4, 2, sparse=True)))
    with pytest.raises(UnsupportedOptionError, match="max_norm"):
        check_embeddings(nn.Sequential(nn.Embedding(4, 2, sparse=True, max_norm=1.0)))
    check_embeddings(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0), nn.EmbeddingBag(4, 2)))
