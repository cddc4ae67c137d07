"""Trains a small GPT on a mesh of processes with Fleet: ``train_torch.py`` and its layers divided over workers."""

from __future__ import annotations

from functools import partial

import torch
from data import batches, open_text
from model import Block, Embedding, Head, Layers, fill, make_gpt
from options import config_of, training_options
from report import Report
from sampling import sample
from schedule import warmup_cosine
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from fleet import fleet
from fleet.meta_parallel import (
    ColumnParallelLinear,
    LayerDesc,
    ParallelCrossEntropy,
    PipelineLayer,
    RowParallelLinear,
    VocabParallelEmbedding,
)

DIVIDED = Layers(
    column=partial(ColumnParallelLinear, weight_attr=fill, gather_output=False),
    row=partial(RowParallelLinear, weight_attr=fill, has_bias=False, input_is_parallel=True),
    embedding=partial(VocabParallelEmbedding, weight_attr=fill),
)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy; each worker has the logits of its part of the vocabulary."""
    losses: Tensor = ParallelCrossEntropy()(logits, targets)
    return losses.mean()


def main() -> None:
    """Trains, and prints the loss on the way and a sample at the end."""
    parser = training_options(__doc__)
    parser.add_argument("--strategy", metavar="FILE", required=True, help="YAML file with the mesh")
    parser.add_argument("--same-start", action="store_true", help="start from the weights of train_torch.py")
    args = parser.parse_args()
    strategy = fleet.DistributedStrategy.load(args.strategy)
    fleet.init(is_collective=True, strategy=strategy)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = config_of(args)

    blocks = [LayerDesc(Block, config, DIVIDED) for _ in range(config.layers)]
    layers = [LayerDesc(Embedding, config, DIVIDED), *blocks, LayerDesc(Head, config, DIVIDED)]
    model = PipelineLayer(layers, loss_fn=next_token_loss).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    optimizer = fleet.distributed_optimizer(optimizer)
    model = fleet.distributed_model(model)
    if args.same_start:
        torch.manual_seed(args.seed)
        model.load_full_state_dict(make_gpt(config).state_dict())
    scheduler = LambdaLR(optimizer, partial(warmup_cosine, num_steps=args.steps))

    share = (fleet.data_rank(), fleet.data_replicas())
    rows = batches(open_text(args.data), args.steps, args.batch_size, args.length, args.seed, *share)
    report = Report(args, fleet.worker_num(), active=fleet.is_first_worker())
    for tokens, targets in report.steps(rows):
        tokens, targets = tokens.to(device), targets.to(device)
        loss = model.train_batch([tokens, targets], optimizer, scheduler)
        report.add(fleet.log({"loss": loss}, total_steps=args.steps)["loss"])
    state = model.full_state_dict(keep=fleet.is_first_worker())
    if args.sample_bytes and fleet.is_first_worker():
        plain = make_gpt(config)  # names and shapes are the plain model's, whatever the mesh
        plain.load_state_dict(state)
        report.line(sample(plain, args.prompt, args.sample_bytes, args.length, seed=args.seed))


if __name__ == "__main__":
    main()
