"""`train_speculators` on a CPU until a number of tokens and of steps is reached: speculators' own command line, model,
loaders, loss, Trainer, optimizers and schedules. Two things are replaced: the device, since its Trainer knows only
accelerators, and the number of epochs and steps, which is worked out from its own packing.

Arguments: SEEN (a JSON file to write), TOKENS, STEPS (at least), then the package's own.
"""

import sys
import time
from pathlib import Path

import torch
from speculators.train import cli, trainer

from dflash_lib.files import write_json
from dflash_lib.hidden_states.formats import train_speculators


class CpuTrainer(trainer.Trainer):
    """Counts what it is shown, and ends where it was told to."""

    def __init__(self, model, config, train_loader, val_loader):
        self.seen = {"steps": 0, "tokens": 0, "slots": 0}
        sampler, num_epochs = train_loader.batch_sampler, 0
        while self.seen["tokens"] < LEAST_TOKENS or self.seen["steps"] < LEAST_STEPS:
            for batch in sampler._generate_batches(num_epochs):
                self.seen["steps"] += 1
                self.seen["tokens"] += int(sum(sampler.lengths[batch]))
                if self.seen["tokens"] >= LEAST_TOKENS and self.seen["steps"] >= LEAST_STEPS:
                    break
            num_epochs += 1
        super().__init__(model, config._replace(num_epochs=num_epochs, max_steps=self.seen["steps"]), train_loader,
                         val_loader)
        self.device_type = "cpu"
        model.register_forward_hook(self.count)

    def count(self, model, inputs, output) -> None:
        if model.training:
            self.seen["slots"] += int(output[2]["full_acc_total"])

    def run_training(self) -> None:
        began = time.monotonic()
        super().run_training()  # its validation at each epoch's end is in the time
        if self.global_step != self.seen["steps"]:
            raise SystemExit(f"speculators took {self.global_step} steps, not {self.seen['steps']}")
        last = SEEN.parent / "last"
        self.model.save_pretrained(last)  # its own checkpoints are rounded to bfloat16, ours are not
        write_json(SEEN, {**self.seen, "seconds": time.monotonic() - began, "checkpoint": str(last.resolve())})


if __name__ == "__main__":
    SEEN, LEAST_TOKENS, LEAST_STEPS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    trainer.get_local_rank = lambda: torch.device("cpu")
    torch.accelerator.synchronize = lambda *_: None
    cli.Trainer = CpuTrainer
    train_speculators.main(sys.argv[4:])
