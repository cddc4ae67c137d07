"""Trains a student on a teacher's probabilities, with the output layer split over the workers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

STEPS = 12
CLASSES = 16


class Student(nn.Module):
    """A body that every worker has whole and a wide output layer."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
        self.output = nn.Linear(32, CLASSES)

    def forward(self, points):
        """Return the logits of each point."""
        return self.output(self.body(points))


def make_batches():
    """Return the batches of eight points and the probabilities of a fixed teacher."""
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(8, CLASSES, generator=generator)
    for _ in range(STEPS):
        points = torch.randn(8, 8, generator=generator)
        yield points, (points @ teacher).softmax(-1)


def main():
    """Train on every batch and print the loss of the last one."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Student()
    plan = {"output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for points, probabilities in make_batches():
        targets = distribute_tensor(probabilities, mesh, [Shard(-1)])
        logits = model(points)
        optimizer.zero_grad()
        with loss_parallel():
            log_probabilities = nn.functional.log_softmax(logits, dim=-1)
            loss = -(targets * log_probabilities).sum() / len(points)
            loss.backward()
        optimizer.step()
    loss = loss.redistribute(mesh, [Replicate()]).to_local()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
