"""Is the target in memory what its files say? A target that is not loads without an error, and so do its hidden states.

What went wrong for users (with any tool): FP8 scales dropped, so that weights were 200 times too large; weights newly
initialised because names differed; all-zero states. Two depths: `quick` compares names, types and a sample of every
tensor with the files (a second or two, for worker processes); `full` also looks at every value, at tied weights, and
at the perplexity of a short text. A target of which only the ends were loaded (ends.py) has everything but the
perplexity looked at, of what is there: parameters on PyTorch's meta device are passed over.
"""

import math
import re
import statistics
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from dflash_lib.files import human_bytes
from dflash_lib.target.checkpoint import Checkpoint, StoredTensor, is_scale, some, text_name
from dflash_lib.target.errors import LoadRefused, TargetError

DEPTHS = ("full", "quick")
TEXT = (
    "The ferry left the harbour shortly after seven in the morning. There were only a few passengers on board: two "
    "teachers on their way to school, a farmer with a basket of eggs, and an old man who read the newspaper. The sea "
    "was calm, and the sun had just come up behind the hills. When the ship passed the lighthouse, the captain sounded "
    "the horn, as he did every day, and a child on the beach waved back. It takes about forty minutes to cross the "
    "bay. In winter, when there is a storm, the ferry sometimes has to wait until the next day."
)
MAX_TEXT_TOKENS = 128
CHUNK = 256  # values: half a page of 16-bit ones, a quarter of 32-bit ones
MOST_ZERO_ROWS = 0.1  # share of a matrix
MOST_TIMES = 30.0  # in SmolLM2 and the tiny hybrid a matrix is 0.28 to 2.3 times its usual size
_VALUE_PROBLEMS = ("not finite", "all zero", "constant", "partly zero", "out of scale", "tied, yet different")  # full
_PROBLEMS = {
    "missing": "the files lack it, so it would be random",
    "wrong shape": "so it would be random",
    "unread scales": "scales of quantised weights that nothing reads: the weights are wrong by that factor",
    "unexpected": "the files have it, the model has no place for it",
    "not as in the files": "in memory there are other values",
    "wrong dtype": "in memory it has another type than asked for",
    "not finite": "NaN or infinity",
    "all zero": "every value is zero",
    "constant": "every value is the same",
    "partly zero": "a hole, such as a piece of a download that was never written",
    "out of scale": "larger or smaller by far than the same matrix of the other layers: was a scale lost?",
    "tied, yet different": "the configuration ties head and embedding, the files hold two different ones",
}


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What was loaded, and what the audit found.

    depth: "full", "quick" or, of `load_ends`, "ends". num_tensors: of the text tower, in `num_files` files; skipped:
    tensors of other towers that were not read, counted by tower; stored_dtypes: the text tower's tensors by the type in
    the files; narrowed: how many were rounded to `dtype`; quantisation: "" or how the files were and what became of it.
    weight_bytes: in memory; memory_free: on the device before loading. num_compared: parameters (of
    `num_parameters_named`) of which a sample was compared with the files. fast_linear_attention: whether the kernels
    are installed (None = the target has no linear-attention layers). perplexity: of TEXT, per token (None = not
    computed). problems: names by kind; a target that was returned has none.
    """

    path: str
    model_class: str
    dtype: str
    device: str
    depth: str
    num_files: int
    num_tensors: int
    num_parameters: int
    num_parameters_named: int
    weight_bytes: int
    memory_free: int
    num_compared: int
    skipped: dict[str, int] = field(default_factory=dict)
    stored_dtypes: dict[str, int] = field(default_factory=dict)
    narrowed: int = 0
    quantisation: str = ""
    fast_linear_attention: bool | None = None
    problems: dict[str, list[str]] = field(default_factory=dict)
    perplexity: float | None = None
    perplexity_limit: float | None = None

    @property
    def checks(self) -> list[tuple[str, float, float, str]]:
        """(name, value, limit, operator) of each check that was made, for a notebook's table."""
        made = [name for name in _PROBLEMS if self.depth != "quick" or name not in _VALUE_PROBLEMS]
        rows: list[tuple[str, float, float, str]] = [
            (f"tensors: {name}", len(self.problems.get(name, [])), 0, "==") for name in made]
        if self.perplexity is not None and self.perplexity_limit is not None:
            rows.append(("perplexity of a short text", self.perplexity, self.perplexity_limit, "<="))
        return rows

    @property
    def rows(self) -> list[tuple[str, str]]:
        """(what, value) as text, for a table; each short enough for one of pandas (50 characters)."""
        count = " + ".join(f"{n} {name}" for name, n in sorted(self.stored_dtypes.items()))
        rows = [
            ("loaded as", f"{self.model_class}, {self.dtype} on {self.device}"),
            ("parameters", f"{self.num_parameters:,} = {human_bytes(self.weight_bytes)} "
                           f"({human_bytes(self.memory_free)} were free)"),
            ("tensors in the files", f"{self.num_tensors} ({count}) in {self.num_files} files"),
            ("not loaded", ", ".join(f"{n} of {tower}" for tower, n in sorted(self.skipped.items())) or "none"),
            ("compared with the files", f"a sample of {self.num_compared} of {self.num_parameters_named} parameters"),
        ]
        if self.quantisation:
            rows.append(("quantisation", self.quantisation))
        if self.narrowed:
            rows.append(("rounded", f"{self.narrowed} tensors that are stored in a wider type"))
        if self.fast_linear_attention is not None:
            rows.append(("linear attention", "flash-linear-attention" if self.fast_linear_attention else
                         "PyTorch (right, but slow on a GPU)"))
        if self.perplexity is not None:
            limit = "no limit" if self.perplexity_limit is None else f"limit {self.perplexity_limit:,.0f}"
            value = f"{self.perplexity:,.1f}" if self.perplexity < 1e6 else f"{self.perplexity:.2g}"
            rows.append(("perplexity of a short text", f"{value} ({limit})"))
        rows.append(("audit", self.depth))
        return rows

    @property
    def is_good(self) -> bool:
        return not any(self.problems.values()) and (
            self.perplexity is None or self.perplexity_limit is None or self.perplexity <= self.perplexity_limit)

    def refuse_if_bad(self) -> None:
        """Raises LoadRefused, naming check and tensors, unless everything is in order."""
        if self.is_good:
            return
        lines = [f"{name} ({_PROBLEMS[name]}): {some(found)}" for name, found in self.problems.items() if found]
        if self.depth == "full" and lines and all(
                name in _VALUE_PROBLEMS for name, found in self.problems.items() if found):
            lines.append('if the publisher\'s own files are so, audit="quick" does not judge values')
        if not lines:
            value = f"{self.perplexity:,.0f}" if self.perplexity < 1e9 else f"{self.perplexity:.2g}"
            lines = [f"perplexity {value} on a short English text, limit {self.perplexity_limit:,.0f}: "
                     "it does not know the language. Weights that are read wrongly do this; for an untrained target or "
                     "one that knows no English give max_perplexity=None"]
        raise LoadRefused(f"{self.path}: what was loaded is not the target in the files, and is refused. "
                          + "; ".join(lines), self)


def sort_unexpected(names: list[str]) -> dict[str, list[str]]:
    """Tensors that the model has no place for, scales apart from the rest; those of other towers are left out."""
    names = sorted(name for name in names if text_name(name) is not None)
    scales = [name for name in names if is_scale(name)]
    return {"unread scales": scales, "unexpected": [name for name in names if name not in scales]}


def wrong_dtypes(model: nn.Module, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """Parameters in another type than `dtype`, those apart that Transformers keeps in float32 on purpose."""
    return {name: p for name, p in model.named_parameters() if not p.is_meta and p.dtype != dtype
            and not (p.dtype == torch.float32 and stays_float32(model, name, dtype))}


def stays_float32(model: nn.Module, name: str, dtype: torch.dtype) -> bool:
    """Whether Transformers keeps a parameter in float32 in a model of `dtype`."""
    kept = {*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    if dtype == torch.float16:
        kept |= {*(getattr(model, "_keep_in_fp32_modules", None) or ())}
    return any(part in name for part in kept)


def bad_values(model: nn.Module) -> dict[str, list[str]]:
    """Parameters that are not finite, all zero, constant, partly zero, or out of scale; each expert by itself.

    A vector or a bias may be constant where all of its kind are (norms and biases as they were initialised): it is
    named only when another layer's is not. A matrix is partly zero when it has a hole (a piece of a download that was
    never written; see find_hole), the embedding and the head aside, whose unused rows may be zero. It is out of scale
    when its values are MOST_TIMES times larger or smaller than in the same matrix of the other layers, of which there
    must be at least two (a scale of one tensor was lost).
    """
    found: dict[str, list[str]] = {kind: [] for kind in ("not finite", "all zero", "constant", "partly zero",
                                                         "out of scale")}
    varied_kinds, constant_vectors, scales = set(), [], {}
    with_unused_rows = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        is_vector = parameter.dim() < 2 or "bias" in name.rpartition(".")[2]
        slices = parameter.detach().flatten(1) if parameter.dim() == 3 and ".experts." in name else \
            parameter.detach().reshape(1, -1)
        lows, highs = chunk_bounds(slices)
        for i, (low, high) in enumerate(zip(lows, highs, strict=True)):
            label = name if len(lows) == 1 else f"{name}[{i}]"
            smallest, largest = float(low.min()), float(high.max())
            if not math.isfinite(smallest) or not math.isfinite(largest):
                found["not finite"].append(label)
            elif smallest == largest and slices.shape[1] > 1:
                if is_vector:
                    constant_vectors.append((label, _kind(name), smallest))
                else:
                    found["all zero" if smallest == 0 else "constant"].append(label)
            elif is_vector:
                varied_kinds.add(_kind(name))
            else:
                magnitudes = torch.maximum(-low, high)
                hole = find_hole(slices[i], parameter.shape[-1]) if bool((magnitudes == 0).any()) and (
                    id(parameter) not in with_unused_rows) else ""
                if hole:
                    found["partly zero"].append(f"{label} ({hole})")
                else:
                    scales.setdefault(_kind(name), []).append((label, float(magnitudes.median())))
    for label, kind, value in constant_vectors:
        if kind in varied_kinds:
            found["all zero" if value == 0 else "constant"].append(label)
    for same in scales.values():
        usual = statistics.median(scale for _, scale in same)
        found["out of scale"] += [f"{label} ({scale / usual:.3g} times)" for label, scale in same if len(same) >= 3
                                  and not usual / MOST_TIMES <= scale <= usual * MOST_TIMES]
    return found


def find_hole(values: Tensor, row_length: int) -> str:
    """Where a matrix, given flat, has at least CHUNK zeros one after another; "" when it has not, and for whole rows of
    zeros, up to MOST_ZERO_ROWS of all: trained models have dead neurons."""
    edges = torch.diff((values == 0).to(torch.int8), prepend=values.new_zeros(1, dtype=torch.int8),
                       append=values.new_zeros(1, dtype=torch.int8)).nonzero()[:, 0].cpu().view(-1, 2)
    holes = [(start, end) for start, end in edges.tolist() if end - start >= CHUNK]
    if all(start % row_length == end % row_length == 0 for start, end in holes) and (
            sum(end - start for start, end in holes) <= MOST_ZERO_ROWS * len(values)):
        return ""
    start, end = max(holes, key=lambda hole: hole[1] - hole[0])
    return f"{end - start} zeros from value {start} of {len(values)} on"


def chunk_bounds(slices: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of every CHUNK values of each row (the last chunk is shorter): float32 [rows, chunks]
    each, on the CPU; NaN where there is one."""
    if slices.element_size() == 1:
        slices = slices.float()  # PyTorch has no minimum of 8-bit floats
    whole = slices.shape[1] // CHUNK * CHUNK
    parts = [torch.aminmax(slices[:, :whole].unflatten(1, (-1, CHUNK)), dim=2)] if whole else []
    if whole < slices.shape[1]:
        parts.append(torch.aminmax(slices[:, whole:], dim=1, keepdim=True))
    return (torch.cat([part.min for part in parts], dim=1).float().cpu(),
            torch.cat([part.max for part in parts], dim=1).float().cpu())


def _kind(name: str) -> str:
    """A parameter's name without its layer's number; the final norm is of the kind of the layers' input norms."""
    if name == "model.norm.weight":
        name = "model.layers.0.input_layernorm.weight"
    return re.sub(r"\.\d+\.", ".N.", name)


def compare_with_files(model: nn.Module, checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    """(compared, differing): parameters of which the first and the last row (a vector: all) were compared with the
    files' values, cast and with their scales; and those that differ.

    This trusts no report of Transformers: it finds weights that were newly initialised, put in another's place, or
    read without their scales. 4-bit experts cannot be compared so and are in neither list.
    """
    compared, differing = [], []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            continue
        for inside, stored in _sources(name, parameter, checkpoint):
            if stored.shape != inside.shape or stored.dtype.startswith("F8") and inside.dim() != 2:
                continue  # reported by its shape, or stored in a form that is converted
            compared.append(name)
            scale = checkpoint.scale_of(stored)
            for row in ([0, len(inside) - 1] if inside.dim() > 1 else [slice(None)]):
                ours = inside[row].detach().cpu().float()
                theirs = _dequantised_row(stored, scale, row).to(parameter.dtype).float()
                if not torch.allclose(ours, theirs, rtol=2 ** -7 if scale else 0.0, atol=0.0, equal_nan=True):
                    differing.append(name)
                    break
    return sorted(set(compared)), sorted(set(differing))


def _sources(name: str, parameter: Tensor, checkpoint: Checkpoint) -> list[tuple[Tensor, StoredTensor]]:
    """Which part of a parameter comes from which stored tensor: one whole, or a mixture of experts saved one by one
    (gate above up, as Transformers joins them)."""
    if name in checkpoint.text:
        return [(parameter, checkpoint.text[name])]
    prefix, _, projection = name.rpartition(".")
    if not prefix.endswith(".experts"):
        return []
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(projection, ())
    found = []
    for expert in range(len(parameter)):
        for part, inside in zip(parts, parameter[expert].chunk(len(parts)) if parts else (), strict=True):
            stored = checkpoint.text.get(f"{prefix}.{expert}.{part}.weight")
            found += [] if stored is None else [(inside, stored)]
    return found


def _dequantised_row(stored: StoredTensor, scale: StoredTensor | None, row: int | slice) -> Tensor:
    """A row's values; with a scale (one a weight, or one a block: [row blocks, column blocks]) multiplied by it, in
    float32. Scales stored as bytes are exponents of two, offset by 127."""
    values = stored.rows(row)
    if scale is None or not isinstance(row, int):
        return values
    factors = scale.whole()
    factors = (factors.float() - 127).exp2() if factors.dtype == torch.uint8 else factors.float()
    if factors.numel() == 1:
        return values.float() * factors.view(())
    row_blocks, column_blocks = factors.shape
    return values.float() * factors[row * row_blocks // stored.shape[0]].repeat_interleave(
        stored.shape[1] // column_blocks)


def default_max_perplexity(vocab_size: int) -> float:
    """The limit for TEXT: a twentieth of the vocabulary, at least 4,000.

    Trained language models are far below (10 to 500, whatever they were tuned for), one with random weights is at about
    its vocabulary size, a mis-scaled one above (2 million for the FP8 fault, with 248,320 tokens). With less than
    about 3,000 tokens random weights pass: such a target is a test's.
    """
    return max(4000.0, vocab_size / 20)


@torch.no_grad()
def perplexity(model: nn.Module, tokenizer: PreTrainedTokenizerBase, text: str = TEXT) -> float:
    """exp(mean negative log-likelihood) of the text's first tokens, each after the ones before it; infinite when the
    logits are not finite. Raises TargetError when the tokenizer makes ids that the embedding has no row for."""
    ids = tokenizer(text)["input_ids"][:MAX_TEXT_TOKENS]  # with a BOS where the tokenizer puts one: Gemma needs it
    rows = model.get_input_embeddings().weight.shape[0]
    if len(ids) < 2 or max(ids) >= rows:
        raise TargetError(f"the tokenizer does not belong to the target: it makes {len(ids)} tokens with ids up to "
                          f"{max(ids, default=0)} of a short text, the embedding has {rows} rows")
    batch = torch.tensor([ids], device=model.get_input_embeddings().weight.device)
    logits = model(input_ids=batch, use_cache=False).logits[0, :-1].float()
    loss = functional.cross_entropy(logits, batch[0, 1:]).item()
    return math.exp(loss) if loss < 700 else math.inf
