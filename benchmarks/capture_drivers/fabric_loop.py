"""A loop with Lightning Fabric: validation, a mean over ranks and a checkpoint in each epoch."""

import tempfile

import torch
from lightning.fabric import Fabric
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cuda", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(1)
data = TensorDataset(torch.randn(32, 16), torch.randint(0, 4, (32,)))
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4))
held_out = fabric.setup_dataloaders(DataLoader(data, batch_size=8))
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
folder = fabric.broadcast(tempfile.mkdtemp())
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
    with torch.no_grad():
        losses = [cross_entropy(model(x), y) for x, y in held_out]
    mean = fabric.all_reduce(torch.stack(losses).mean())
    fabric.print("epoch", epoch, mean.item())
    fabric.save(f"{folder}/last.ckpt", {"model": model, "epoch": epoch})
