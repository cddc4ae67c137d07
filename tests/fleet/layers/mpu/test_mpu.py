"""Fleet's paths of divided layers: they exist, are the same objects, and do nothing on one worker."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

import fleet
from fleet.errors import ConfigError
from fleet.layers.mpu import mp_layers, mp_ops, random
from tests.helpers.sources import ROOT


def test_each_name_has_one_home() -> None:
    """Surface sections 3 and 4: the layers are in fleet.meta_parallel and in fleet.layers.mpu."""
    for name in mp_layers.__all__:
        assert getattr(mp_layers, name) is getattr(fleet.meta_parallel, name)
        assert getattr(mp_layers, name) is getattr(fleet.layers.mpu, name)
    assert random.get_rng_state_tracker() is fleet.meta_parallel.get_rng_state_tracker()
    assert random.model_parallel_random_seed is fleet.meta_parallel.model_parallel_random_seed
    for package in ("fleet.meta_parallel", "fleet.layers", "fleet.layers.mpu"):
        module = import_module(package)
        assert all(getattr(module, name) is not None for name in module.__all__)
        with pytest.raises(AttributeError, match="Nothing"):
            _ = module.Nothing
    assert set(fleet.meta_parallel.__all__) <= set(dir(fleet.meta_parallel))
    assert set(fleet.layers.mpu.__all__) <= set(dir(fleet.layers.mpu))


def test_the_private_exchanges_do_nothing_alone() -> None:
    """Surface section 3: the primitives that model code calls."""
    x = torch.randn(2, 4)
    for call in (mp_ops._c_identity, mp_ops._mp_allreduce, mp_ops._c_split, mp_ops._c_concat):
        assert call(x) is x
    with pytest.raises(ConfigError, match="adds up"):
        mp_ops._mp_allreduce(x, op=dist.ReduceOp.MAX)


@pytest.mark.parametrize("call", [fleet.split, fleet.layers.mpu.split])
def test_split_names_the_layers(call: object) -> None:
    """Surface section 3: paddle.distributed.split raises ValueError in dynamic mode."""
    with pytest.raises(ValueError, match=r"ColumnParallelLinear.*RowParallelLinear.*VocabParallelEmbedding"):
        call(torch.ones(2), (2, 2), "linear")  # type: ignore[operator]


COST = """
import sys, time
import torch, torch.distributed
from fleet import fleet
fleet.init
began = time.process_time()
from fleet import meta_parallel
[getattr(meta_parallel, name) for name in ("ColumnParallelLinear", "ParallelCrossEntropy", "get_rng_state_tracker")]
from fleet.utils import sequence_parallel_utils
print(time.process_time() - began, "torch.distributed.tensor" in sys.modules, "torch._dynamo" in sys.modules)
"""


def test_importing_the_layers_is_cheap() -> None:
    """Design 7: fleet.meta_parallel adds less than 0.1 s, and no torch.distributed.tensor."""
    done = subprocess.run(
        [sys.executable, "-c", COST], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    seconds, *loaded = done.stdout.split()
    assert float(seconds) < 0.1
    assert loaded == ["False", "False"]
