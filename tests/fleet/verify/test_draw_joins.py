"""What one process gets for the draws of two workers."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fleet.verify.draw_joins import drawing_state, drawn_as, joined, tensor_of, with_states

A, B = torch.tensor([3, 1]), torch.tensor([2, 5])


@pytest.mark.parametrize(
    ("name", "wanted", "parts", "grows", "found"),
    [
        ("rand", [0] * 4, [A, B], False, [3, 1, 2, 5]),
        ("randint", [0] * 2, [A, A], False, [3, 1]),  # equal ones are shared
        ("randint", [0] * 2, [A, B], False, None),
        ("randint", [0] * 2, [A, B], True, [3, 1, 2, 5]),  # a batch that the script draws
        ("randint", [0], [A[:1], B[:1]], True, None),  # a number decides what is done, and one has no room for two
        ("dropout", [0] * 2, [A, B], True, None),  # its size is that of its input
        ("randperm", [0] * 4, [torch.tensor([1, 0])] * 2, False, [1, 0, 3, 2]),  # rows stay with their worker
    ],
)
def test_draws_are_joined(name: str, wanted: list[int], parts: list[Tensor], grows: bool, found: list[int]) -> None:
    made = joined(name, torch.tensor(wanted), parts, grows=grows)
    assert (None if made is None else made.tolist()) == found


def test_draws_for_batches_of_own_lengths_fill_the_beginning_of_their_rows() -> None:
    own = torch.full((3, 3, 2), 9)
    made = joined("dropout", own, [torch.zeros(1, 3, 2, dtype=int), torch.ones(2, 2, 1, dtype=int)], grows=False)
    assert made is not None
    assert made[0].tolist() == [[0, 0]] * 3
    assert made[1].tolist() == made[2].tolist() == [[1, 9], [1, 9], [9, 9]]
    assert joined("dropout", own, [torch.zeros(1, 3, 2)] * 2, grows=False) is None


@pytest.mark.parametrize("drawn", [0.5, 3, np.float64(0.5), np.arange(3), [4, 7], torch.ones(2)])
def test_a_draw_comes_back_in_its_form(drawn: object) -> None:
    value = tensor_of(drawn)
    assert value is not None
    made = drawn_as(drawn, value)
    assert type(made) is type(drawn)
    assert torch.equal(torch.as_tensor(made), torch.as_tensor(drawn))


def test_what_is_no_number_is_left_alone() -> None:
    assert tensor_of("heads") is tensor_of(["a", "b"]) is tensor_of(None) is None


@pytest.mark.parametrize("lies_across", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_an_operation_that_draws_inside_torch_gives_each_part_what_its_worker_got(
    axis: int, *, lies_across: bool
) -> None:
    def operation(part: Tensor) -> Tensor:
        return torch.alpha_dropout(part, 0.4, train=True)

    parts, states, expected = [], [], []
    for rank, rows in enumerate((3, 5)):
        torch.manual_seed(rank)
        part = torch.randn(7, rows) if axis else torch.randn(rows, 7)
        parts.append(part.t().contiguous().t() if lies_across else part)
        states.append(drawing_state(parts[-1], 1))
        expected.append(operation(parts[-1]))
    whole, together = torch.cat(parts, axis), torch.cat(states)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    made = with_states(operation, whole, together)
    assert made is not None
    assert torch.equal(made, torch.cat(expected, axis))
    assert not torch.equal(before, torch.get_rng_state())  # no other call may begin with this state
    assert with_states(operation, whole[:1], together) is None
    shared = drawing_state(parts[1][:1].expand(parts[1].shape), 1)
    assert with_states(operation, whole, torch.cat([states[0], shared])) is None
