"""The models of deepctr-torch and torch-rechub, as their users build them, small, and batches for all of them.

``PublicModels`` holds many at once: they share no parameter, so one job trains each as a job of its own would.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Its import asks PyPI for newer versions, in a thread that a process waits for.
sys.modules.setdefault("deepctr_torch.utils", types.SimpleNamespace(check_version=lambda version: None))  # type: ignore[arg-type]

BATCH, LENGTH, NEGATIVES = 8, 5, 3
USERS, ITEMS, CITIES, DIM = 20, 30, 6, 4
RATE, STEPS = 0.05, 6
Batch = dict[str, Tensor]

# Their forward draws random numbers, or their index is a draw of kmeans: no two runs are alike.
RANDOM = ("rechub_MIND",)
# What names the embeddings of each, where they are not in dictionaries.
PATTERNS = (
    "*.embedding_dict.*",  # of deepctr-torch
    "*.embed_dict.*",  # of torch-rechub
    "*.emb1", "*.emb2", "*.pos_embedding", "*.position_embedding", "*.position_emb", "*.time_embedding",
    "*.token_embedding", "*.item_embedding", "*.concept_embedding", "*.vq_layers.*.embedding",
    "*.rechub_STAMP.item_emb", "*.rechub_NARM.item_emb", "*.relative_attention_bias",
)  # fmt: skip


def batch_of(step: int, rank: int = 0) -> Batch:
    """Returns the batch of a worker: ids above 0, histories padded with 0 at their end."""
    generator = torch.Generator().manual_seed(100 + 10 * step + rank)

    def ids(high: int, *shape: int) -> Tensor:
        return torch.randint(1, high, (BATCH, *shape), generator=generator)

    lengths = torch.randint(2, LENGTH + 1, (BATCH, 1), generator=generator)
    kept = torch.arange(LENGTH) < lengths
    found = {"user": ids(USERS), "item": ids(ITEMS), "city": ids(CITIES), "neg_items": ids(ITEMS, NEGATIVES)}
    found |= {name: ids(ITEMS, LENGTH) * kept for name in ("hist_item", "neg_hist_item", "pos")}
    age, weight = torch.rand(2, BATCH, generator=generator)
    label = torch.randint(0, 2, (BATCH, 2), generator=generator).float()
    found |= {"age": age, "sample_weight": weight + 0.1, "seq_length": lengths[:, 0], "label": label}
    return {**found, "seq": found["hist_item"], "neg": found["neg_hist_item"], "neg_item": found["neg_items"][:, 0]}


class PublicModels(nn.Module):
    """Models by name; forward returns the sum of their losses."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        makers = {**_deepctr(), **_rechub()}
        self.models = nn.ModuleDict()
        for number, name in enumerate(names or makers):
            torch.manual_seed(7 + number)
            self.models[name] = makers[name]()
            _spread(self.models[name])

    def forward(self, x: Batch) -> Tensor:
        """Returns the sum of the losses."""
        return torch.stack([loss_of(model, x) for model in self.models.values()]).sum()


def all_names() -> list[str]:
    """Returns the names of all models."""
    return [*_deepctr(), *_rechub()]


def _spread(model: nn.Module) -> None:
    """Draws embeddings anew: both libraries begin so close to 0 that few of their layers would learn in six steps.

    So are the weights that ComirecDR leaves as it finds them in memory. The gates of a SENet of few fields pass two
    ReLUs, and weights below 0 may close them for every sample: they begin above 0.
    """
    for module in model.modules():
        if type(module).__name__ == "CapsuleNetwork" and hasattr(module, "w"):
            nn.init.normal_(module.w, std=0.3)
        if type(module).__name__ == "SENETLayer":
            for weight in module.parameters():
                nn.init.uniform_(weight, 0.3, 1)
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.3)
            if module.padding_idx is not None:
                nn.init.zeros_(module.weight[module.padding_idx])


def loss_of(model: nn.Module, x: Batch) -> Tensor:
    """Returns the loss of one of the models."""
    label = x["label"]
    if hasattr(model, "get_regularization_loss"):  # of deepctr-torch, as its fit() computes it
        columns = {name: x[name].float().reshape(BATCH, -1) for name in model.feature_index}
        predicted = model(torch.cat(list(columns.values()), 1))
        wanted = label[:, : predicted.shape[1]]
        extra = model.get_regularization_loss() + model.aux_loss
        return F.binary_cross_entropy(predicted, wanted) + extra.sum()
    kind = type(model).__name__
    if kind == "TIGERModel":
        return model(input_ids=x["hist_item"], labels=x["neg_items"])["loss"]
    if kind == "RQVAEModel":
        inputs = torch.stack([x["age"], x["sample_weight"], label[:, 0], label[:, 1]], 1)
        out, quantized, _ = model(inputs)
        return model.compute_loss(out, quantized, inputs)[0]
    if kind in ("HSTUModel", "HLLMModel"):
        logits = model(x["hist_item"], x["pos"] * 100)
        return F.cross_entropy(logits.flatten(0, 1), x["pos"].flatten())
    found = model(x)
    outputs = found if isinstance(found, tuple) else (found,)
    return torch.stack([(one - _target(one)).square().mean() for one in outputs]).sum()


def _target(outputs: Tensor) -> Tensor:
    return (torch.arange(outputs.numel()) % 3 / 2).view_as(outputs)


def _deepctr() -> dict[str, Callable[[], nn.Module]]:
    from deepctr_torch import models
    from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat

    sparse = [SparseFeat("user", USERS, DIM), SparseFeat("item", ITEMS, DIM), SparseFeat("city", CITIES, DIM)]
    history = [
        VarLenSparseFeat(SparseFeat(name, ITEMS, DIM, embedding_name="item"), LENGTH, length_name="seq_length")
        for name in ("hist_item", "neg_hist_item")
    ]
    pooled = VarLenSparseFeat(SparseFeat("hist_item", ITEMS, DIM), LENGTH)
    both = [*sparse, DenseFeat("age", 1)]
    small: dict[str, Any] = {"dnn_hidden_units": (8, 4)}
    wide = {
        "AFN": {"ltl_hidden_size": 8, "afn_dnn_hidden_units": (8, 4)},
        "CCPM": {"conv_kernel_width": (2, 2), "dnn_hidden_units": (8,)},
        "AFM": {}, "xDeepFM": {"cin_layer_size": (8, 4), **small},
    }  # fmt: skip
    names = ["AFN", "AutoInt", "CCPM", "DCN", "DCNMix", "DIFM", "DeepFM", "FiBiNET", "IFM", "NFM", "ONN", "WDL"]
    made: dict[str, Callable[[], nn.Module]] = {}
    for name in [*names, "AFM", "xDeepFM"]:
        columns = sparse if name in ("AFM", "CCPM") else [*both, pooled] if name in ("DeepFM", "WDL") else both
        settings = wide.get(name, small)
        made[name] = lambda kind=name, of=columns, given=settings: getattr(models, kind)(of, of, **given)  # type: ignore[misc]
    made["PNN"] = lambda: models.PNN(both, use_outter=True, **small)
    made["MLR"] = lambda: models.MLR(both)
    made["DIN"] = lambda: models.DIN([*both, history[0]], ["item"], att_hidden_size=(8,), **small)
    made["DIEN"] = lambda: models.DIEN(
        [*both, *history], ["item"], gru_type="AUGRU", use_negsampling=True, att_hidden_units=(8,), **small
    )
    made |= _tasks(both)
    return {f"deepctr_{name}": make for name, make in made.items()}


def _tasks(columns: list[Any]) -> dict[str, Callable[[], nn.Module]]:
    from deepctr_torch import models

    tower: dict[str, Any] = {"tower_dnn_hidden_units": (4,)}
    experts: dict[str, Any] = {"expert_dnn_hidden_units": (8,), "gate_dnn_hidden_units": (4,), **tower}
    return {
        "ESMM": lambda: models.ESMM(columns, **tower),
        "SharedBottom": lambda: models.SharedBottom(columns, bottom_dnn_hidden_units=(8,), **tower),
        "MMOE": lambda: models.MMOE(columns, **experts),
        "PLE": lambda: models.PLE(columns, **experts),
    }


def _rechub() -> dict[str, Callable[[], nn.Module]]:
    made = {**_ranking(), **_multi_task(), **_matching(), **_generative()}
    return {f"rechub_{name}": make for name, make in made.items()}


DIMS: dict[str, Any] = {"dims": [8, DIM]}


def _sparse(name: str, size: int, dim: int = DIM, **more: Any) -> Any:
    return _features().SparseFeature(name, size, dim, **more)


def _dense(name: str) -> Any:
    return _features().DenseFeature(name)


def _sequence(name: str, shared: str | None = "item") -> Any:
    return _features().SequenceFeature(name, ITEMS, DIM, pooling="concat", shared_with=shared, padding_idx=0)


def _features() -> Any:
    return importlib.import_module("torch_rechub.basic.features")


def _user() -> list[Any]:
    return [_sparse("user", USERS), _sparse("city", CITIES)]


def _item() -> list[Any]:
    return [_sparse("item", ITEMS, padding_idx=0)]


def _both() -> list[Any]:
    return [*_user(), *_item()]


def _ranking() -> dict[str, Callable[[], nn.Module]]:
    def ffm(kind: str, *more: Any) -> nn.Module:
        sizes = {"user": USERS, "item": ITEMS, "city": CITIES}
        linear = [_sparse(name, size, 1) for name, size in sizes.items()]
        crossed = [_sparse(name, 3 * size) for name, size in sizes.items()]
        return _made(f"ranking.deepffm.{kind}")(linear, crossed, DIM, *more, {"dims": [8]})

    def bst() -> nn.Module:
        sizes = {"nhead": 2, "dropout": 0.0, "max_seq_len": LENGTH + 1}
        return _made("ranking.bst.BST")(_user(), [_sequence("hist_item")], _item(), {"dims": [8]}, **sizes)

    def dien() -> nn.Module:
        history, other = [_sequence("hist_item")], [_sequence("neg_hist_item")]
        return _made("ranking.dien.DIEN")(_user(), history, other, _item(), {"dims": [8]})

    def din() -> nn.Module:
        return _made("ranking.din.DIN")(_user(), [_sequence("hist_item")], _item(), {"dims": [8]}, {"dims": [8]})

    return {
        "AFM": lambda: _made("ranking.afm.AFM")(_both(), DIM, 4),
        "AutoInt": lambda: _made("ranking.autoint.AutoInt")(_both(), [_dense("age")], mlp_params=DIMS),
        "BST": bst,
        "DCN": lambda: _made("ranking.dcn.DCN")(_both(), 2, DIMS),
        "DCNv2": lambda: _made("ranking.dcn_v2.DCNv2")(_both(), 2, DIMS, low_rank=2),
        "DeepFFM": lambda: ffm("DeepFFM"),
        "FatDeepFFM": lambda: ffm("FatDeepFFM", 1),
        "DeepFM": lambda: _made("ranking.deepfm.DeepFM")([*_user(), _dense("age")], _both(), DIMS),
        "DIEN": dien,
        "DIN": din,
        "EDCN": lambda: _made("ranking.edcn.EDCN")(_both(), 2, {"activation": "relu"}),
        "FiBiNet": lambda: _made("ranking.fibinet.FiBiNet")(_both(), DIMS, 1),
        "WideDeep": lambda: _made("ranking.widedeep.WideDeep")(_user(), [*_item(), _dense("age")], DIMS),
    }


def _multi_task() -> dict[str, Callable[[], nn.Module]]:
    towers = [{"dims": [4]}, {"dims": [4]}]
    tasks = ["classification", "classification"]
    return {
        "AITM": lambda: _made("multi_task.aitm.AITM")(_both(), 2, DIMS, towers),
        "ESMM": lambda: _made("multi_task.esmm.ESMM")(_user(), _item(), DIMS, DIMS),
        "MMOE": lambda: _made("multi_task.mmoe.MMOE")(_both(), tasks, 2, DIMS, towers),
        "PLE": lambda: _made("multi_task.ple.PLE")(_both(), tasks, 2, 1, 1, DIMS, towers),
        "SharedBottom": lambda: _made("multi_task.shared_bottom.SharedBottom")(_both(), tasks, DIMS, towers),
    }


def _matching() -> dict[str, Callable[[], nn.Module]]:
    def listwise(path: str, **more: Any) -> nn.Module:
        history, others = [_sequence("hist_item")], [_sequence("neg_items")]
        return _made(f"matching.{path}")(_user(), history, _item(), others, **more)

    def facebook() -> nn.Module:
        other = [_sparse("neg_item", ITEMS, shared_with="item")]
        return _made("matching.dssm_facebook.FaceBookDSSM")(_user(), _item(), other, DIMS, DIMS)

    def senet() -> nn.Module:
        return _made("matching.dssm_senet.DSSM")(_user(), [*_item(), _sparse("neg_item", ITEMS)], DIMS, DIMS)

    def sbc() -> nn.Module:
        return _made("matching.youtube_sbc.YoutubeSBC")(_user(), _item(), [_dense("sample_weight")], DIMS, DIMS, BATCH)

    def sasrec() -> nn.Module:
        sequences = [_sequence("seq", None), _sequence("pos", "seq"), _sequence("neg", "seq")]
        return _made("matching.sasrec.SASRec")(sequences, LENGTH, 0.0)

    def sine() -> nn.Module:
        return _made("matching.sine.SINE")(["hist_item"], ["item"], ["neg_items"], ITEMS, DIM, 4, 4, 2, LENGTH)

    return {
        "ComirecSA": lambda: listwise("comirec.ComirecSA", interest_num=2),
        "ComirecDR": lambda: listwise("comirec.ComirecDR", max_length=LENGTH, interest_num=2),
        "MIND": lambda: listwise("mind.MIND", max_length=LENGTH, interest_num=2),
        "GRU4Rec": lambda: listwise("gru4rec.GRU4Rec", user_params=DIMS),
        "DSSM": lambda: _made("matching.dssm.DSSM")(_user(), _item(), DIMS, DIMS),
        "DSSM_SENet": senet,
        "FaceBookDSSM": facebook,
        "YoutubeDNN": lambda: _made("matching.youtube_dnn.YoutubeDNN")(
            _user(), _item(), [_sequence("neg_items")], DIMS
        ),
        "YoutubeSBC": sbc,
        "NARM": lambda: _made("matching.narm.NARM")(_sequence("hist_item", None), 8, 0.0, 0.0),
        "STAMP": lambda: _made("matching.stamp.STAMP")(_sequence("hist_item", None), 0.3, 0.3),
        "SASRec": sasrec,
        "SINE": sine,
    }


def _generative() -> dict[str, Callable[[], nn.Module]]:
    def tiger() -> nn.Module:
        from transformers import T5Config

        sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": ITEMS}
        return _made("generative.tiger.TIGERModel")(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))

    def hllm() -> nn.Module:
        sizes = (ITEMS, 8, 2, 1, LENGTH, 0.0)
        return _made("generative.hllm.HLLMModel")(torch.randn(ITEMS, 8), *sizes, num_time_buckets=16, temperature=1.0)

    return {
        "HSTU": lambda: _made("generative.hstu.HSTUModel")(ITEMS, 8, 2, 1, 4, 4, LENGTH, 0.0, num_time_buckets=16),
        "HLLM": hllm,
        "RQVAE": lambda: _made("generative.rqvae.RQVAEModel")(4, [8, 8], 4, [8], sk_epsilons=[0.0, 0.0]),
        "TIGER": tiger,
    }


def _made(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"torch_rechub.models.{module}"), name)
