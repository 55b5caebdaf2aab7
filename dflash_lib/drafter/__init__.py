"""The drafter: blocks and masks, network, losses, dataset, training, checkpoints, export."""

from dflash_lib.drafter.export import export_speculators, export_zlab, serving_note
from dflash_lib.drafter.folder import DrafterError, TrainedDrafter, load_drafter
from dflash_lib.drafter.inference import DrafterProposer, Proposer
from dflash_lib.drafter.training import TrainingError, TrainOptions, read_log
from dflash_lib.drafter.training_job import start_training

__all__ = ["DrafterError", "DrafterProposer", "Proposer", "TrainOptions", "TrainedDrafter", "TrainingError",
           "export_speculators", "export_zlab", "load_drafter", "read_log", "serving_note", "start_training"]
