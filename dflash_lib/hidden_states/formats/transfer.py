"""Feeds the speculators package's own trainer from a store: nothing is exported but its Arrow data set.

`StoreTransfer` is handed to its data set class (`ArrowDataset(..., transfer=StoreTransfer(store))`). Its command line
learns of it through the backend registered here; `python -m dflash_lib.hidden_states.formats.train_speculators` is that
command line with this module imported. Row i of the data set is the store's i-th sample by index, as `convert` writes
it (`--rows-only` leaves the states where they are).

Needs hs-connectors 0.9.0, which comes with speculators and is no part of this project's environment.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.hidden_states.store import HiddenStateStore
from dflash_lib.target.capture import stack_states

try:
    from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
except ImportError as error:
    raise ImportError("hs_connectors is not installed; it comes with speculators: pip install --no-deps "
                      "speculators==0.9.0 hs-connectors==0.9.0 (README.md, Other tools' states)") from error

BACKEND = "dflash-store"


class StoreTransfer(HiddenStatesTransfer):
    """speculators' samples straight out of a store: hidden_states bfloat16 [T, L + 1, H], the last slot before the
    norm, and token_ids int64 [T]. It can be sent to data loader workers; each opens its own files.

    Raises StoreError for a store that is not complete, or holds no last hidden state.
    """

    def __init__(self, store: Path | str):
        self.store = HiddenStateStore.open(store)
        if not self.store.plan.last:
            raise StoreError(f"{store}: holds no last hidden state, and speculators needs it: its labels are the "
                             "target's own choices")
        self.indices = self.store.sample_indices

    def get_cached(self, file_idx: int) -> dict[str, Tensor] | None:
        """The sample of row `file_idx`; None past the last one, which speculators takes as missing."""
        if not 0 <= file_idx < len(self.indices):
            return None
        sample = self.store.read(self.indices[file_idx])
        states = stack_states(sample)
        return {"hidden_states": states, "token_ids": torch.from_numpy(sample.input_ids.astype(np.int64))}

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, Tensor] | None:
        """Nothing is generated here: all there is, is in the store."""
        raise StoreError(f"{self.store.folder}: a store has no states to generate; train with --on-missing raise")


@HiddenStatesBackend.register(BACKEND)
class StoreBackend(HiddenStatesBackend):
    """`--hidden-states-backend dflash-store --dflash-store STORE` of `speculators train`."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--dflash-store", type=str, default=None, help="folder of the hidden-state store")

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """No server takes part."""

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> StoreTransfer:
        if not args.dflash_store:
            raise StoreError(f"--hidden-states-backend {BACKEND}: give --dflash-store STORE")
        return StoreTransfer(args.dflash_store)

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        raise StoreError(f"{BACKEND}: a store is read, no server writes it; extract with 04_extract")
