"""ignite's distributed helpers and its engine, with a metric that is reduced over ranks."""

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.metrics import Accuracy


def training(local_rank):
    device = idist.device()
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
    loader = idist.auto_dataloader(data, batch_size=16, shuffle=True)
    model = idist.auto_model(torch.nn.Linear(16, 4))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))

    def step(engine, batch):
        x, y = (part.to(device) for part in batch)
        optimizer.zero_grad()
        found = model(x)
        loss = torch.nn.functional.cross_entropy(found, y)
        loss.backward()
        optimizer.step()
        return found, y

    trainer = Engine(step)
    Accuracy(device=device).attach(trainer, "accuracy")

    @trainer.on(Events.EPOCH_COMPLETED)
    def tell(engine):
        idist.barrier()
        if idist.get_rank() == 0:
            print("epoch", engine.state.epoch, engine.state.metrics)

    trainer.run(loader, max_epochs=2)


if __name__ == "__main__":
    with idist.Parallel(backend="nccl") as parallel:
        parallel.run(training)
