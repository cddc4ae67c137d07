"""Sentences padded to the longest of a batch and classified by a recurrent network: accumulation under no_sync."""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ACCUMULATE = 2


class Reviews(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        self.texts = [
            torch.randint(1, 50, (int(torch.randint(3, 12, (1,), generator=generator)),), generator=generator)
            for _ in range(count)
        ]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        text = self.texts[index]
        return text, float(text.float().mean() > 25)


def collate_batch(batch):
    texts, labels = zip(*batch, strict=True)
    lengths = torch.tensor([len(text) for text in texts])
    return pad_sequence(texts, batch_first=True), lengths, torch.tensor(labels)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=0)
        self.rnn = nn.GRU(16, 24, batch_first=True)
        self.fc = nn.Linear(24, 1)

    def forward(self, text, lengths):
        packed = pack_padded_sequence(self.embedding(text), lengths, batch_first=True, enforce_sorted=False)
        _, hidden = self.rnn(packed)
        return self.fc(hidden[-1]).squeeze(1)


def main():
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    data = Reviews(192)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16 // world_size, sampler=sampler, collate_fn=collate_batch)
    model = DDP(Classifier())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.BCEWithLogitsLoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (text, lengths, label) in enumerate(loader):
            is_last = (i + 1) % ACCUMULATE == 0
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = criterion(model(text, lengths), label) / ACCUMULATE
                loss.backward()
            if is_last:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch}: loss {ACCUMULATE * loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
