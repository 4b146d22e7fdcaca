"""mmengine's Runner: training with DDP, and a metric whose results are collected from all ranks."""

import tempfile

import torch
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch.nn.functional import cross_entropy


class Net(BaseModel):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(16, 32)
        self.head = torch.nn.Linear(32, 4)

    def forward(self, x, y, mode):
        found = self.head(self.body(x).relu())
        if mode == "loss":
            return {"loss": cross_entropy(found, y)}
        return found, y


class Accuracy(BaseMetric):
    def process(self, data_batch, data_samples):
        found, y = data_samples
        self.results.append((found.argmax(dim=1) == y).float().mean().item())

    def compute_metrics(self, results):
        return {"accuracy": sum(results) / len(results)}


torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(32, 16), torch.randint(0, 4, (32,)))


def loader(shuffle):
    return {
        "batch_size": 4,
        "dataset": data,
        "sampler": {"type": "DefaultSampler", "shuffle": shuffle},
        "collate_fn": {"type": "default_collate"},
    }


runner = Runner(
    model=Net(),
    work_dir=tempfile.mkdtemp(),
    train_dataloader=loader(True),
    optim_wrapper={"optimizer": {"type": torch.optim.SGD, "lr": 0.1}},
    train_cfg={"by_epoch": True, "max_epochs": 2, "val_interval": 1},
    val_dataloader=loader(False),
    val_cfg={},
    val_evaluator={"type": Accuracy},
    launcher="pytorch",
)
runner.train()
