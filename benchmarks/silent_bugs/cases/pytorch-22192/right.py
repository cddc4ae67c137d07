"""Trains a classifier of clips of several lengths with DDP and a batch norm over all workers' frames."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 4
EPOCHS = 2


class Clips(Dataset):
    """64 clips of 3 to 20 frames, each frame of 8 numbers, in three classes."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        centres = torch.randn(3, 8, generator=generator)
        self.clips = []
        for _ in range(64):
            label = int(torch.randint(3, (), generator=generator))
            length = int(torch.randint(3, 21, (), generator=generator))
            frames = centres[label] * (length / 10) + torch.randn(length, 8, generator=generator)
            self.clips.append((frames, label))

    def __len__(self):
        return len(self.clips)

    def __getitem__(self, index):
        return self.clips[index]


def collate(clips):
    """Pad the clips to the longest one; return the frames, their lengths and the labels."""
    frames = nn.utils.rnn.pad_sequence([frames for frames, _ in clips], batch_first=True)
    lengths = torch.tensor([len(frames) for frames, _ in clips])
    return frames, lengths, torch.tensor([label for _, label in clips])


class SyncedNorm(nn.Module):
    """A batch norm whose mean and variance are taken over the rows of all workers."""

    def __init__(self, features, momentum=0.1):
        super().__init__()
        self.momentum = momentum
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, rows):
        """Normalize rows of shape (number, features)."""
        if not self.training:
            mean, variance = self.running_mean, self.running_var
            return (rows - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias
        count = all_reduce(torch.tensor(float(len(rows))))
        mean = all_reduce(rows.sum(0)) / count
        square = all_reduce(rows.square().sum(0)) / count
        variance = square - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        return (rows - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias


class Classifier(nn.Module):
    """Encodes each frame, takes the mean over a clip's frames and classifies it."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(8, 16)
        self.norm = SyncedNorm(16)
        self.head = nn.Linear(16, 3)

    def forward(self, frames, lengths):
        """Return the logits of each clip."""
        real = torch.arange(frames.shape[1]) < lengths[:, None]
        hidden = torch.zeros(*frames.shape[:2], 16)
        hidden[real] = torch.relu(self.norm(self.encode(frames[real])))
        return self.head(hidden.sum(1) / lengths[:, None])


def main():
    """Train for two epochs and print the loss of each."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Classifier(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    dataset = Clips()
    sampler = DistributedSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, collate_fn=collate)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for frames, lengths, labels in loader:
            loss = nn.functional.cross_entropy(model(frames, lengths), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
