"""Sentences that every worker pads to the longest of its own batch; padded positions count for nothing."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, ids, is_word):
        read = self.layer(self.words(ids), src_key_padding_mask=~is_word) * is_word.unsqueeze(-1)
        return self.head(read.sum(1) / is_word.sum(1, keepdim=True))


def collate(samples):
    longest = max(len(words) for words, _ in samples)
    ids = torch.full((len(samples), longest), 19)
    for row, (words, _) in zip(ids, samples, strict=True):
        row[: len(words)] = words
    return ids, ids != 19, torch.tensor([label for _, label in samples])


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
sentences = [torch.randint(19, (int(length),)) for length in torch.randint(2, 9, (48,))]
data = [(words, int(words[0] > 9)) for words in sentences]
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler, collate_fn=collate)
model = DistributedDataParallel(Reader())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for ids, is_word, labels in loader:
    loss = nn.functional.cross_entropy(model(ids, is_word), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
