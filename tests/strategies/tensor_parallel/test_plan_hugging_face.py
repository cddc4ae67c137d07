"""tensor_parallel_configs['plan'] on models of the real transformers package, random weights, mp 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleet import fleet
from fleet.strategies._shared.parameter_layout import Layout, layouts_in
from tests.helpers.workers import run_workers

SIZES = {"vocab_size": 64, "initializer_range": 0.2}
GPT2 = {
    "transformer.wte": "vocab",
    "transformer.h.*.attn.c_attn": "column:3",
    "transformer.h.*.attn": "divide:split_size",
    "transformer.h.*.attn.c_proj": "row",
    "transformer.h.*.mlp.c_fc": "column",
    "transformer.h.*.mlp.c_proj": "row",
}
BERT = {
    "bert.embeddings.word_embeddings": "vocab",
    "bert.encoder.layer.*.attention.self.[qkv]*": "column",
    "bert.encoder.layer.*.attention.self.dropout": "own_random",
    "bert.encoder.layer.*.attention.output.dense": "row",
    "bert.encoder.layer.*.intermediate.dense": "column",
    "bert.encoder.layer.*.output.dense": "row",
}


def llama(tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **sizes, num_key_value_heads=2, tie_word_embeddings=tied))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **sizes, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**SIZES, **none, n_positions=32, n_embd=32, n_layer=2, n_head=4))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**SIZES, **sizes, **none, max_position_embeddings=16))


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "llama": (llama, "auto"),
    "llama tied": (lambda: llama(tied=True), "auto"),
    "qwen3": (qwen3, "auto"),
    "gpt2": (gpt2, GPT2),
    "bert": (bert, BERT),
}


def trained(model: nn.Module, optimizer: Any, whole: Callable[..., dict[str, Tensor]]) -> dict[str, Any]:
    """Returns the first logits and gradients, and losses and weights of 3 steps."""
    tokens = torch.randint(64, (4, 12), generator=torch.Generator().manual_seed(1))
    result: dict[str, Any] = {"losses": []}
    model.train()
    for step in range(3):
        out = model(input_ids=tokens, labels=tokens)
        out.loss.backward()
        if not step:
            named = dict(model.named_parameters())
            result["logits"] = out.logits.detach().clone()
            result["gradients"] = whole({name: p.grad.clone() for name, p in named.items()})
        result["losses"].append(out.loss.item())
        optimizer.step()
        optimizer.zero_grad()
    result["weights"] = whole({name: p.detach().clone() for name, p in model.named_parameters()})
    return result


def joined(layouts: dict[str, Layout], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns whole tensors, gathered over all workers."""
    found = {}
    for name, tensor in tensors.items():
        if (layout := layouts.get(name)) is not None:
            parts = [torch.empty_like(tensor) for _ in range(layout.parts)]
            torch.distributed.all_gather(parts, tensor.contiguous())
            tensor = layout.joined(parts)
        found[name] = tensor
    return found


def train_cases(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    """Trains each model, divided; returns the numbers of worker 0 and how much of the weights each holds."""
    results = {}
    for name in names:
        make, plan = CASES[name]
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": world_size}
        strategy.tensor_parallel_configs = {"plan": plan}
        fleet.init(is_collective=True, strategy=strategy)
        torch.manual_seed(3 + rank)  # the first worker's weights count
        model = make()
        before = dict(model.named_parameters())
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-2)
        wrapped, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
        assert all(p is before[n] for n, p in wrapped.named_parameters())
        layouts = layouts_in(model)
        result = trained(wrapped, optimizer, lambda tensors, layouts=layouts: joined(layouts, tensors))
        result["share"] = sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in make().parameters())
        results[name] = result
    return results


def relative(a: Tensor, b: Tensor) -> float:
    """Returns the largest difference over the largest value."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-2))


@pytest.mark.slow
def test_divided_models_train_as_one_process() -> None:
    """Issue 12, 1: Llama, GPT-2 and BERT; logits, every gradient and 3 AdamW steps within 1e-5."""
    first, second = run_workers(train_cases, 2, list(CASES), backend=None)
    for name in CASES:
        torch.manual_seed(3)
        model = CASES[name][0]()
        expected = trained(model, torch.optim.AdamW(model.parameters(), 0.01, eps=1e-2), lambda tensors: tensors)
        for found in (first[name], second[name]):
            assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5), name
            assert relative(found["logits"], expected["logits"]) < 1e-5, name
            assert found["gradients"].keys() == expected["gradients"].keys()
            for kind in ("gradients", "weights"):
                for parameter, value in expected[kind].items():
                    assert relative(found[kind][parameter], value) < 1e-5, (name, kind, parameter)
            assert found["share"] < 0.62, name
