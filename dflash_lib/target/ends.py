"""Loads of the target only what training a drafter reads: embedding, final norm and head, and the layers that a warm
start copies. Of a 27B that is 5 GB instead of 54, on every GPU.

The model is built from its configuration on PyTorch's meta device, where modules are real and take no memory; then the
wanted modules get their tensors from the files, by the same names as in `load_target`. All else stays on the meta
device, and raises when it is run: PyTorch lets some operations on a mixture of both pass, without values.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import GenerationConfig

from dflash_lib.target.audit import stays_float32
from dflash_lib.target.checkpoint import PLAIN, Checkpoint, some
from dflash_lib.target.configuration import read_config, text_tower, without_weights
from dflash_lib.target.errors import TargetError
from dflash_lib.target.hub import find_target
from dflash_lib.target.loading import (
    Target,
    check_device,
    check_end_of_turn,
    load_report,
    load_target,
    load_tokenizer,
    open_checkpoint,
    parse_dtype,
    quiet_transformers,
)
from dflash_lib.target.memory import check_memory

NOTHING = {"missing_keys": [], "mismatched_keys": [], "unexpected_keys": []}


def meta_target(model: Path | str, dtype: torch.dtype | str) -> Target:
    """The text tower of the folder `model` on the meta device, in `dtype`, as `load_target` would have it."""
    config = text_tower(read_config(model), model)
    network = without_weights(config, model, parse_dtype(dtype))
    return Target(Path(model), network.eval().requires_grad_(False), None, None)


def end_modules(target: Target, layers: Sequence[int] = ()) -> list[nn.Module]:
    """The modules that `load_ends` gives their tensors. Raises TargetError for layers that the target lacks."""
    wrong = [i for i in layers if not 0 <= i < target.num_layers]
    if wrong:
        raise TargetError(f"{target.path}: layers {wrong} asked for, the target has {target.num_layers}")
    ends = [target.embedding, target.final_norm, target.head, *(target.layers[i] for i in layers)]
    return [module for end in ends for name, module in end.named_modules() if "experts" not in name.split(".")]


def load_ends(path_or_hub_id: Path | str, dtype: torch.dtype | str = torch.float32, device: str = "cpu",
              layers: Sequence[int] = ()) -> Target:
    """A target of which only the embedding, the final norm, the head and decoder layers `layers` have their values, on
    `device`; the same values, bit for bit, as `load_target` has. Experts of these layers have none either: a warm start
    does not copy them.

    What is there is audited: names and shapes, every value, and a head that is tied yet different. What is not there
    is not, nor is the perplexity. That is enough for training: the files were audited before states were taken, and the
    store knows them by the hash of all weights, which `identity` computes here as for a whole target.

    Files that are not these tensors as they are (quantised weights of `layers`; names or shapes that only Transformers
    can say something about) are loaded as a whole in main memory, with a warning; then all but the ends is let go.
    Raises TargetError and LoadRefused as `load_target` does.
    """
    dtype = parse_dtype(dtype)
    check_device(device)
    path = find_target(path_or_hub_id)
    config, checkpoint = open_checkpoint(path)
    tokenizer = load_tokenizer(path)
    model = without_weights(config, path, dtype).eval().requires_grad_(False)
    wanted = _parameters(model, end_modules(Target(path, model, tokenizer, None), layers))
    num = sum(parameter.numel() for parameter in set(wanted.values()))
    _, free = check_memory(f"{path}, embedding and head", num, dtype, device, converted=False)
    reason = _why_not(wanted, checkpoint) or _make_buffers(model, wanted, device)
    if reason:
        warnings.warn(f"{path}: {reason}, so the whole target is loaded in main memory and all but what training needs "
                      "is let go", stacklevel=2)
        model = load_target(path, dtype, "cpu", audit="quick").model
        _let_go(model, set(wanted), device)
    else:
        if (path / "generation_config.json").is_file():  # else it is made of config.json in both ways of loading
            with quiet_transformers():
                model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
        _read(model, wanted, checkpoint, dtype, device)
    check_end_of_turn(path, model)
    report = load_report(path, model, tokenizer, checkpoint, NOTHING, config, dtype, device, free, "ends", None)
    target = Target(path, model, tokenizer, report)
    if _is_dead(target.final_norm):  # alone of its kind, which bad_values cannot judge
        report.problems["all zero"].append("model.norm.weight")
    report.refuse_if_bad()
    _refuse_the_rest(target, layers)
    return target


def _parameters(model: nn.Module, modules: list[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of `modules` by name; one that has two names (a tied head) stands under both."""
    wanted = {id(module) for module in modules}
    return {f"{prefix}.{name}": parameter for prefix, module in model.named_modules(remove_duplicate=False)
            if id(module) in wanted for name, parameter in module.named_parameters(recurse=False)}


def _stored_names(wanted: dict[str, nn.Parameter], checkpoint: Checkpoint) -> dict[nn.Parameter, str | None]:
    """Under which of its names the files have each parameter; None = under none."""
    found: dict[nn.Parameter, str | None] = dict.fromkeys(wanted.values())
    for name, parameter in wanted.items():
        if found[parameter] is None and name in checkpoint.text:
            found[parameter] = name
    return found


def _why_not(wanted: dict[str, nn.Parameter], checkpoint: Checkpoint) -> str:
    """Why these tensors cannot be read from the files one by one; "" when they can."""
    names = _stored_names(wanted, checkpoint)
    absent = [name for name, parameter in wanted.items() if names[parameter] is None]
    if absent:
        return f"the files have no {some(absent)}"
    stored = {name: (checkpoint.text[name], parameter) for parameter, name in names.items()}
    other = [name for name, (tensor, parameter) in stored.items() if tensor.shape != tuple(parameter.shape)]
    if other:
        return f"the files have another shape of {some(other)}"
    scaled_modules = {name.rpartition(".")[0] for name, tensor in checkpoint.text.items() if tensor.is_scale}
    scaled = [name for name, (tensor, _) in stored.items()
              if tensor.dtype not in PLAIN or name.rpartition(".")[0] in scaled_modules]
    return f"quantised are {some(scaled)}" if scaled else ""


@torch.no_grad()
def _make_buffers(model: nn.Module, wanted: dict[str, nn.Parameter], device: str) -> str:
    """Gives the wanted modules the buffers that no file has (Gemma's scale of the embedding), made by the model's own
    code as in loading; the parameters are still on the meta device, where that code changes nothing. Returns which
    buffers it did not make, "" for none."""
    unmade = []
    for prefix in dict.fromkeys(name.rpartition(".")[0] for name in wanted):
        module = model.get_submodule(prefix)
        names = [name for name, _ in module.named_buffers(recurse=False)]
        for name in names:
            buffer = module._buffers[name]
            module._buffers[name] = torch.full(buffer.shape, float("nan"), dtype=buffer.dtype) if (
                buffer.is_floating_point()) else torch.zeros(buffer.shape, dtype=buffer.dtype)
        if names:
            model._init_weights(module)
        for name in names:
            made = module._buffers[name]
            if not made.is_floating_point() or made.isnan().any():
                unmade.append(f"{prefix}.{name}")
            module._buffers[name] = made.to(device)
    return f"this Transformers cannot make {some(unmade)} alone" if unmade else ""


def _read(model: nn.Module, wanted: dict[str, nn.Parameter], checkpoint: Checkpoint, dtype: torch.dtype,
          device: str) -> None:
    """Puts the files' tensors in the parameters' places, a tied one in both."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for parameter, name in _stored_names(wanted, checkpoint).items():
        kept = torch.float32 if stays_float32(model, name, dtype) else dtype
        value = torch.empty(parameter.shape, dtype=kept, device=device)
        made[parameter] = nn.Parameter(value.copy_(checkpoint.text[name].whole()), requires_grad=False)
    for name, parameter in wanted.items():
        _put(model, name, made[parameter])


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, leaf = name.rpartition(".")
    model.get_submodule(module)._parameters[leaf] = parameter


def _let_go(model: nn.Module, wanted: set[str], device: str) -> None:
    """Moves the parameters `wanted` and their modules' buffers to `device`, all else to the meta device."""
    kept = {name.rpartition(".")[0] for name in wanted}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if name in wanted:
            parameter.data = parameter.data.to(device)  # in its place: a tied head stays tied
        else:
            _put(model, name, nn.Parameter(parameter.data.to("meta"), requires_grad=False))
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device if prefix in kept else "meta")


def _refuse_the_rest(target: Target, layers: Sequence[int]) -> None:
    """Lets modules whose parameters have no values, and the model and decoder as a whole, raise when they are run."""
    def refuse(*_: object) -> None:
        raise TargetError(f"only embedding, final norm, head and layers {list(layers)} of {target.path} were loaded: "
                          "what is run here needs load_target")

    for module in target.model.modules():
        if module in (target.model, target.decoder) or any(p.is_meta for p in module.parameters(recurse=False)):
            module.register_forward_pre_hook(refuse)


@torch.no_grad()
def _is_dead(norm: nn.Module) -> bool:
    """Whether nothing comes out of a norm, whichever way it applies its weight."""
    weight = norm.weight
    return not norm(torch.full((1, len(weight)), 1e3, dtype=weight.dtype, device=weight.device)).any()
