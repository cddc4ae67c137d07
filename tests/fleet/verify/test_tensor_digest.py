"""Digests are linear, find what differs, and do not depend on the length of other tensors."""

import torch

from fleet.verify.tensor_digest import NO_MEMORY, content, memory_of, rows_digest, whole_digest


def test_the_mean_of_digests_is_the_digest_of_the_mean() -> None:
    a, b = torch.randn(33, 5), torch.randn(33, 5)
    mean = whole_digest((a + b) / 2)["p"]
    assert abs((whole_digest(a)["p"] + whole_digest(b)["p"]) / 2 - mean) < 1e-5


def test_a_changed_number_changes_the_projection() -> None:
    a = torch.zeros(1000)
    b = a.clone()
    b[617] = 1.0
    assert abs(whole_digest(a)["p"] - whole_digest(b)["p"]) > 1e-3


def test_rows_are_projected_one_by_one() -> None:
    x = torch.randn(6, 3, 2)
    whole, part = rows_digest(x), rows_digest(x[2:4])
    assert whole is not None
    assert part is not None
    assert torch.allclose(torch.tensor(whole["rows0"][2:4]), torch.tensor(part["rows0"]), atol=1e-5)
    assert abs(sum(whole["rows0"]) - whole["total0"]) < 1e-4


def test_content_is_that_of_the_bytes() -> None:
    x = torch.arange(4.0)
    assert content(x) == content(x.clone()) != content(x + 1)
    assert content("text") == ""


def test_tensors_without_numbers_share_no_memory() -> None:
    whole = torch.ones(4)
    assert memory_of(whole) == memory_of(whole.view(2, 2)) != memory_of(whole[:2])
    assert memory_of(whole[:0]) == memory_of(torch.ones(4, device="meta")) == NO_MEMORY
