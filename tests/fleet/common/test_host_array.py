"""Tests of tensors as arrays on the host."""

import numpy as np
import pytest
import torch

from fleet import metrics
from fleet.common.host_array import host_array
from fleet.errors import ConfigError
from tests.fleet.job.test_util import alone

UTIL = alone()


def test_values_on_the_host():
    assert host_array("text") == "text"
    assert host_array(torch.ones(2, dtype=torch.bfloat16)).dtype == np.float32
    assert host_array(torch.ones(2, requires_grad=True)).tolist() == [1, 1]
    assert host_array(np.ma.masked_array([1, 2], mask=[False, False])).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ma.masked_array([0.5, 0.9], mask=[False, True]), "masked values"),
        (torch.tensor([0.5, 0.9]).to_sparse(), "layout torch.sparse_coo"),
        (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "it takes dense ones"),
    ],
)
def test_values_that_would_count_as_others_are_refused(value, message):
    """The mask was dropped, and the values below it were counted."""
    for call in (
        host_array,
        lambda value: metrics.StatAuc().update(value, [1, 0]),
        lambda value: metrics.acc(value, 2, util=UTIL),
    ):
        with pytest.raises(ConfigError, match=message):
            call(value)
