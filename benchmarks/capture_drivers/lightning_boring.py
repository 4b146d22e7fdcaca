"""Lightning's BoringModel under one of its strategies: ``lightning_boring.py ddp|fsdp``."""

import sys

from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

trainer = Trainer(
    accelerator="cuda",
    devices=2,
    strategy=sys.argv[1],
    max_steps=3,
    limit_val_batches=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)


class Model(BoringModel):
    """FSDP has its parameters only once the model is laid out."""

    def configure_optimizers(self):
        import torch

        return torch.optim.SGD(
            self.trainer.model.parameters() if sys.argv[1] == "fsdp" else self.layer.parameters(),
            lr=0.1,
        )


trainer.fit(Model())
