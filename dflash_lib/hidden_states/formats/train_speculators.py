"""`speculators train` with this project's store among its backends.

    python -m dflash_lib.hidden_states.formats.train_speculators --hidden-states-backend dflash-store \
        --dflash-store STORE --data-path ROWS --on-missing raise ...

All arguments are the package's own; ROWS is what `convert STORE ROWS --to speculators --rows-only` wrote.
"""

import sys

from dflash_lib.hidden_states.formats import transfer  # noqa: F401  registers the backend, before the parser is made


def main(arguments: list[str]) -> None:
    """Runs the package's trainer."""
    from speculators.train.cli import main as train
    from speculators.train.config import TrainConfig

    train(TrainConfig.resolve(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
