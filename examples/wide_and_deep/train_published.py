"""Trains wide & deep on parameter servers that publish their rows, and exports the network after every pass.

``train_fleet_ps.py`` and two calls: ``fleet.ps.publish`` sends the rows that change to a folder or to Redis, and
``fleet.save_inference_model`` writes the network as a program. ``serve.py`` serves both.
"""

from __future__ import annotations

from functools import partial

import torch
from data import batches_of, open_data
from model import MODELS
from options import make_optimizer, training_options
from report import Report
from torch.utils.data import DistributedSampler
from train_fleet_ps import DEVICE, NEW_ROWS, train_epoch

from fleet import fleet


def main() -> None:
    """Serves the rows, or trains."""
    parser = training_options(__doc__)
    parser.add_argument(
        "--publish", metavar="SINK", required=True, help="where rows go: a folder, or redis://host:port/0"
    )
    parser.add_argument("--export", metavar="DIR", required=True, help="where the network goes")
    args = parser.parse_args()
    fleet.init()
    fleet.ps.publish(args.publish, every_s=0.5)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    torch.manual_seed(args.seed)

    data = open_data(args.data)
    sampler = DistributedSampler[int](data.train, fleet.worker_num(), fleet.worker_index(), seed=args.seed)
    loader = batches_of(data.train, sampler, args.batch_size, drop_last=True)
    example = data.test[:4][:2]  # ids and dense numbers

    table = partial(fleet.SparseEmbedding, padding_idx=0, initializer=NEW_ROWS)
    model = MODELS[args.model](table, data.slots, data.num_dense, args.dim, args.layers).to(DEVICE)
    optimizer = fleet.distributed_optimizer(make_optimizer(args, model.parameters()))
    model = fleet.distributed_model(model)
    fleet.init_worker()

    report = Report(args, active=fleet.is_first_worker(), log=fleet.log)
    fleet.save_inference_model(dirname=args.export, example_inputs=example)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_epoch(model, optimizer, loader, report)
        report.end_pass(epoch)
        fleet.save_inference_model(dirname=args.export, example_inputs=example)
    fleet.stop_worker()


if __name__ == "__main__":
    main()
