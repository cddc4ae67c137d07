"""Trains a small network on handwritten digits in one process, in plain torch."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
digits = load_digits()
split = train_test_split(digits.data / 16, digits.target, test_size=360, random_state=0)
images, test_images, labels, test_labels = (torch.tensor(part, device=device) for part in split)
train = TensorDataset(images.float(), labels)
loader = DataLoader(train, batch_size=16, shuffle=True)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(5):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        hits = (model(test_images.float()).argmax(1) == test_labels).sum()
    print(f"epoch {epoch}: loss {loss:.3f}, {hits} of {len(test_labels)} test images")
