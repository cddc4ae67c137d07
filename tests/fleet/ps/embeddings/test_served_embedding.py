"""The lookup of many rows: the gradients are those of torch's own backward, bit for bit."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from fleet.ps.embeddings.lookup import TrainedRows
from fleet.ps.embeddings.row_sums import MANY_IDS
from fleet.ps.embeddings.served_embedding import ServedEmbedding, serve_embeddings


def embedding(rows: np.ndarray) -> ServedEmbedding:
    module = torch.nn.Sequential(torch.nn.Embedding(*rows.shape, sparse=True))
    serve_embeddings(module)
    module[0].lookup.source = TrainedRows(0, lambda keys: rows[keys].copy(), lambda wanted, is_next: None, lambda: True)
    return module[0]


def losses(found: Tensor, weights: Tensor) -> list[Tensor]:
    return [(found * weights).sum(), found.pow(2).mean()]


@pytest.mark.parametrize("num_ids", [MANY_IDS - 13, MANY_IDS, 4 * MANY_IDS])
@pytest.mark.parametrize("num_rows", [3, 900])
def test_gradients_of_many_ids_are_those_of_torch(num_ids, num_rows):
    rng = torch.Generator().manual_seed(1)
    values = torch.randn(num_rows, 10, generator=rng)
    ids = torch.randint(0, num_rows, (num_ids // 13, 13), generator=rng)
    weights = torch.randn(*ids.shape, 10, generator=rng) * 10.0 ** torch.randint(-6, 6, (*ids.shape, 10), generator=rng)
    weights[0] = -0.0
    module = embedding(values.numpy())
    for loss in losses(module(ids), weights):
        loss.backward(retain_graph=True)
    taken = module.lookup.take()

    leaf = values.clone().requires_grad_()
    for loss in losses(torch.nn.functional.embedding(ids, leaf), weights):
        loss.backward(retain_graph=True)
    assert taken.rows.tobytes() == leaf.grad.numpy()[taken.ids].tobytes()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_that_keep_their_graph_are_those_of_torch():
    values = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(2 * MANY_IDS) % 50
    module = embedding(values.numpy())
    module(ids).pow(3).sum().backward(create_graph=True)
    leaf = values.clone().requires_grad_()
    torch.nn.functional.embedding(ids, leaf).pow(3).sum().backward(create_graph=True)
    taken = module.lookup.take()
    assert taken.rows.tobytes() == leaf.grad.detach().numpy()[taken.ids].tobytes()


def test_threads_that_look_up_at_once_get_their_own_rows():
    values = np.arange(60_000, dtype=np.float32).reshape(30_000, 2)
    module, wrong = embedding(values), []

    def look_up(seed):
        rng = torch.Generator().manual_seed(seed)
        for _ in range(150):
            ids = torch.randint(0, len(values), (int(torch.randint(10, 4000, (), generator=rng)),), generator=rng)
            with torch.no_grad():
                if not torch.equal(module(ids), torch.from_numpy(values)[ids]):
                    wrong.append(seed)

    threads = [threading.Thread(target=look_up, args=(seed,)) for seed in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_any_form_are_found(dtype):
    values = np.arange(40, dtype=np.float32).reshape(20, 2)
    module = embedding(values)
    ids = torch.arange(20, dtype=dtype).view(4, 5)
    for form in (ids, ids.T, ids[::2, 1:], ids[:0], ids[3, 3]):
        assert module(form).tolist() == torch.from_numpy(values)[form.long()].tolist()
    for wrong in (-1, 20):
        with pytest.raises(IndexError, match="there are 20 rows"):
            module(torch.tensor([3, wrong]))
