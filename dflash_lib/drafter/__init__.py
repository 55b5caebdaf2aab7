"""The drafter: blocks and masks, network, losses, dataset, training, checkpoints, export."""

from dflash_lib.drafter.export import export_speculators, export_zlab, serving_note
from dflash_lib.drafter.folder import DrafterError, TrainedDrafter, load_drafter
from dflash_lib.drafter.inference import DrafterProposer, Proposer
from dflash_lib.drafter.recipe import Compute, TrainingError, TrainOptions
from dflash_lib.drafter.training_job import start_training
from dflash_lib.drafter.training_log import read_log

__all__ = ["Compute", "DrafterError", "DrafterProposer", "Proposer", "TrainOptions", "TrainedDrafter", "TrainingError",
           "export_speculators", "export_zlab", "load_drafter", "read_log", "serving_note", "start_training"]
