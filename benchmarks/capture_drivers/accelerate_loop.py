"""A loop with accelerate: gradient accumulation, evaluation on all ranks and early stopping."""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2)
set_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
data = TensorDataset(torch.randn(42, 16), torch.randint(0, 4, (42,)))
train = DataLoader(data, batch_size=4, shuffle=True)
held_out = DataLoader(data, batch_size=8)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
model, optimizer, train, held_out = accelerator.prepare(net, optimizer, train, held_out)
for epoch in range(2):
    for x, y in train:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    right = 0
    for x, y in held_out:
        with torch.no_grad():
            found = model(x).argmax(dim=-1)
        found, y = accelerator.gather_for_metrics((found, y))
        right += (found == y).sum().item()
    accelerator.print("epoch", epoch, right / len(data))
    if right == len(data):
        accelerator.set_trigger()
    if accelerator.check_trigger():
        break
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    accelerator.save(accelerator.unwrap_model(model).state_dict(), tempfile.mkdtemp() + "/net.pt")
accelerator.end_training()
