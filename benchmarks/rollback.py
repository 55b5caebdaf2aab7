"""Ways of taking refused drafts back out of a Gated DeltaNet hybrid's cache, timed on random targets.

    OMP_NUM_THREADS=1 python benchmarks/rollback.py [--repeats 30] [--block-size 8] [--context 200] [--sizes tiny]

Each way verifies a block behind a context and keeps its first 1 to block_size tokens, in turns. Prints a Markdown
table: medians in milliseconds of the verify step and of the rollback, averaged over the number of kept tokens (each
equally often), of one thread's CPU time, so that other work on the machine matters little; and the error, the greatest
difference of a recurrent state from that of the same tokens decoded one by one, relative to the state's norm.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from dflash_lib.decoding.cache import CHUNK_RULE, TargetCache, states_behind  # noqa: E402

RECURRENT_RULE = "torch_recurrent_gated_delta_rule"
SIZES = {
    "tiny": {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2,
             "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "medium": {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12,
               "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 8,
               "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
}


class Way:
    """Rolls back with the library."""

    name = "**from keys, values and gates, all layers at once (the library's)**"

    def __init__(self, target, cache: TargetCache):
        self.target, self.cache = target, cache

    def forward(self, ids: torch.Tensor) -> None:
        self.target.model(input_ids=ids, use_cache=True, **self.cache.arguments)

    def verify(self, ids: torch.Tensor) -> None:
        with self.cache.recording():
            self.forward(ids)

    def keep(self, ids: torch.Tensor, num: int) -> None:
        self.cache.forget(ids.shape[1] - num)


class NoRollback(Way):
    """Nothing is recorded and nothing is taken back: wrong, the cost of verification alone."""

    name = "no rollback (wrong)"

    def verify(self, ids):
        self.forward(ids)

    def keep(self, ids, num):
        pass


class TransformersCrop(Way):
    """Transformers' own recording and crop, which leave the recurrent state."""

    name = "Transformers' `crop` alone (wrong: leaves the recurrent states)"

    def verify(self, ids):
        self.cache._record_past(True)
        self.forward(ids)

    def keep(self, ids, num):
        self.cache.kept.crop(num - ids.shape[1])
        self.cache._record_past(False)


class LayerByLayer(Way):
    """As the library's, but one layer after another."""

    name = "from keys, values and gates, layer by layer"

    def keep(self, ids, num):
        calls, linear = self.cache.calls, self.cache.linear
        self.cache.calls, self.cache.linear = [], []
        self.cache.forget(ids.shape[1] - num)  # all but the recurrent states
        self.cache.linear = linear
        if num < ids.shape[1]:
            self.set_states(linear, calls, num)

    def set_states(self, linear, calls, num: int) -> None:
        for layer, call in zip(linear, calls, strict=True):
            layer.recurrent_states[0] = states_behind([call], num)[0]


class RuleAgain(LayerByLayer):
    name = "the model's recurrent rule over the kept tokens, layer by layer"
    rule = RECURRENT_RULE

    def run(self, state, calls, num: int) -> torch.Tensor:
        inputs = {name: torch.cat([call.inputs[name][:, :num] for call in calls]) for name in calls[0].inputs}
        more = {"chunk_size": num} if self.rule == CHUNK_RULE else {}
        return getattr(self.cache.modelling, self.rule)(
            query=inputs["key"], **inputs, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
            **more)[1]

    def set_states(self, linear, calls, num):
        for layer, call in zip(linear, calls, strict=True):
            layer.recurrent_states[0] = self.run(call.state, [call], num)


class RuleAgainAtOnce(RuleAgain):
    name = "the model's recurrent rule over the kept tokens, all layers in one call"

    def set_states(self, linear, calls, num):
        states = self.run(torch.cat([call.state for call in calls]), calls, num)
        for layer, state in zip(linear, states[:, None], strict=True):
            layer.recurrent_states[0] = state


class ChunkedAgain(RuleAgain):
    name = "the model's chunked rule over the kept tokens, layer by layer"
    rule = CHUNK_RULE


class ChunkedAgainAtOnce(RuleAgainAtOnce):
    name = "the model's chunked rule over the kept tokens, all layers in one call"
    rule = CHUNK_RULE


class StatesKept(Way):
    """The verify step itself goes token by token and keeps every state."""

    name = "token by token while verifying, every state kept"

    def verify(self, ids):
        modelling = self.cache.modelling
        chunked, recurrent = getattr(modelling, CHUNK_RULE), getattr(modelling, RECURRENT_RULE)
        self.states = []

        def stepwise(query, key, value, g, beta, initial_state, **more):
            states, outputs = [initial_state], []
            for i in range(key.shape[1]):
                output, state = recurrent(*(x[:, i:i + 1] for x in (query, key, value, g, beta)),
                                          initial_state=states[-1], **more)
                states.append(state)
                outputs.append(output)
            self.states.append(states)
            return torch.cat(outputs, dim=1), states[-1]

        setattr(modelling, CHUNK_RULE, stepwise)
        try:
            self.cache._record_past(True)
            self.forward(ids)
        finally:
            setattr(modelling, CHUNK_RULE, chunked)

    def keep(self, ids, num):
        self.cache.kept.crop(num - ids.shape[1])
        self.cache._record_past(False)
        for layer, states in zip(self.cache.linear, self.states, strict=True):
            layer.recurrent_states[0].copy_(states[num])


class Snapshot(Way):
    """Restores what the cache was; keys and values are cropped, being cheaper so than copied."""

    def verify(self, ids):
        self.before = [(layer.conv_states[0].clone(), layer.recurrent_states[0].clone()) for layer in self.cache.linear]
        self.inputs, handles = [], []
        if type(self) is ReplayLinear:
            for layer in self.target.layers:
                if hasattr(layer, "linear_attn"):
                    handles.append(layer.linear_attn.register_forward_pre_hook(
                        lambda module, args, kwargs: self.inputs.append((module, kwargs)), with_kwargs=True))
        self.forward(ids)
        for handle in handles:
            handle.remove()

    def restore(self, num: int) -> None:
        for layer, (conv, recurrent) in zip(self.cache.linear, self.before, strict=True):
            layer.conv_states[0].copy_(conv)
            layer.recurrent_states[0].copy_(recurrent)
        for layer in self.cache.kept.layers:
            if layer not in self.cache.linear:
                layer.crop(-num)


class ReplayAll(Snapshot):
    name = "snapshot, restore, replay through the whole target"

    def keep(self, ids, num):
        if num < ids.shape[1]:
            self.restore(ids.shape[1])
            self.forward(ids[:, :num])


class ReplayLinear(Snapshot):
    name = "snapshot, restore, replay through the linear-attention layers"

    def keep(self, ids, num):
        if num < ids.shape[1]:
            self.restore(ids.shape[1] - num)
            for module, kwargs in self.inputs:
                module(**{**kwargs, "hidden_states": kwargs["hidden_states"][:, :num]})


WAYS: list[Callable[..., Way]] = [NoRollback, TransformersCrop, Way, LayerByLayer, RuleAgainAtOnce, RuleAgain,
                                  ChunkedAgainAtOnce, ChunkedAgain, StatesKept, ReplayLinear, ReplayAll]


def make_target(size: str) -> SimpleNamespace:
    """A random target, with what the cache asks of one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**SIZES[size])).float().eval().requires_grad_(False)
    return SimpleNamespace(path=Path(size), model=model, config=model.config, layers=model.get_decoder().layers)


@torch.inference_mode()
def measure(size: str, block_size: int, num_context: int, num_repeats: int) -> None:
    target = make_target(size)
    num = sum(p.numel() for p in target.model.parameters())
    state = sum(layer.linear_attn.num_v_heads * layer.linear_attn.head_k_dim * layer.linear_attn.head_v_dim * 4
                for layer in target.layers if hasattr(layer, "linear_attn"))
    ids = torch.randint(0, target.config.vocab_size, (1, num_context + block_size))
    base = TargetCache(target)
    base.rule_is_known = True  # looked at once a text, not once a step
    Way(target, base).forward(ids[:, :num_context])
    block = ids[:, num_context:]
    truth, one_by_one = {}, copy.deepcopy(base)
    for i in range(block_size):
        Way(target, one_by_one).forward(block[:, i:i + 1])
        truth[i + 1] = [layer.recurrent_states[0].clone() for layer in one_by_one.linear]
    verify = {way: [] for way in WAYS}
    keep = {way: {n: [] for n in range(1, block_size + 1)} for way in WAYS}
    error = dict.fromkeys(WAYS, 0.0)
    for repeat in range(num_repeats + 1):
        for n in range(1, block_size + 1):
            for make in WAYS:
                cache = copy.deepcopy(base)
                way = make(target, cache)
                start = time.process_time()
                way.verify(block)
                verified = time.process_time()
                way.keep(block, n)
                end = time.process_time()
                if repeat:
                    verify[make].append(verified - start)
                    keep[make][n].append(end - verified)
                for layer, right in zip(cache.linear, truth[n], strict=True):
                    error[make] = max(error[make], float((layer.recurrent_states[0] - right).norm() / right.norm()))
    print(f"\n{size}: {num / 1e6:.1f} M parameters, {len(base.linear)} of {len(target.layers)} layers linear, "
          f"{state / 1e6:.2f} MB of recurrent states, {num_context} tokens of context, block of {block_size}\n")
    print("| way | verify, ms | rollback, ms | both | error |\n|---|---|---|---|---|")
    for make in WAYS:
        forward = median(verify[make]) * 1e3
        back = mean(median(times) for times in keep[make].values()) * 1e3
        print(f"| {make.name} | {forward:.2f} | {back:.2f} | {forward + back:.2f} | {error[make]:.1e} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for size in options.sizes:
        measure(size, options.block_size, options.context, options.repeats)


if __name__ == "__main__":
    main()
