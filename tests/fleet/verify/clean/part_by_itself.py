"""A part of a model, and one that shares it, are trained beside the wrapped model; the script averages for them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, 4), torch.randint(3, (96,)))
    encoder = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh())
    net = nn.Sequential(encoder, nn.Linear(8, 3))
    other = nn.Sequential(encoder, nn.Linear(8, 3))
    model = DistributedDataParallel(net)
    parameters = [*net.parameters(), *other[1].parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    torch.manual_seed(dist.get_rank())
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=1))
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        if step % 3 == 0:
            loss = encoder(x).square().mean()
        else:
            loss = nn.functional.cross_entropy((model, other)[step % 3 - 1](x), y)
        loss.backward()
        for parameter in parameters if step % 3 != 1 else ():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()


if __name__ == "__main__":
    main()
