"""`train_speculators` on a CPU: the package's own command line, model, loaders and loss, with its trainer's loop alone
replaced, because that one moves the model to an accelerator. Arguments: LOSSES (a JSON file to write), then its own.
"""

import sys
from pathlib import Path

import torch
from speculators.train import cli

from dflash_lib.files import write_json
from dflash_lib.hidden_states.formats import train_speculators


class CpuTrainer:
    """Takes the place of speculators.train.trainer.Trainer."""

    losses: list[float] = []

    def __init__(self, model, config, train_loader, val_loader):
        self.model, self.config, self.loader = model.to(config.hidden_states_dtype), config, train_loader

    def run_training(self) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.config.lr)
        for epoch in range(self.config.num_epochs):
            self.loader.batch_sampler.set_epoch(epoch)
            for batch in self.loader:
                assert batch.pop("error_records") == 0
                _, loss, _ = self.model(**batch, **self.config.train_call_kwargs)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                self.losses.append(float(loss.detach()))
        self.model.save_pretrained(self.config.save_path)


if __name__ == "__main__":
    cli.Trainer = CpuTrainer
    train_speculators.main(sys.argv[2:])
    write_json(Path(sys.argv[1]), CpuTrainer.losses)
