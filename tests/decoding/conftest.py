"""A tiny target whose greedy text varies: with tied embeddings, random weights only repeat the last token."""

import pytest
import torch

from dflash_lib.target.loading import Target, load_target


@pytest.fixture(scope="session")
def talker(tiny_llama_folder) -> Target:
    """The tiny dense target with a random head of its own."""
    target = load_target(tiny_llama_folder)
    generator = torch.Generator().manual_seed(3)
    target.head.weight = torch.nn.Parameter(torch.randn(target.head.weight.shape, generator=generator),
                                            requires_grad=False)
    return target
