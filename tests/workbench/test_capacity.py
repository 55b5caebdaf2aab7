import json

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from dflash_lib.conversations.formats import ConversationError
from dflash_lib.conversations.prepare import PrepareOptions, prepare
from dflash_lib.conversations.sources import SourceError
from dflash_lib.decoding.cache import cache_argument
from dflash_lib.target import memory
from dflash_lib.target.checkpoint import Checkpoint
from dflash_lib.target.configuration import read_config, text_tower
from dflash_lib.target.loading import TargetError, load_target
from dflash_lib.workbench import peak_memory
from dflash_lib.workbench.capacity import (
    bytes_per_token,
    data_size,
    decoding_state,
    disk_table,
    on_disk,
    resources,
    target_size,
)
from tests.conftest import DATA
from tests.families import FAMILIES, change_config, make_family
from tests.miniature import make_miniature


def test_the_27b_from_its_configuration_alone():
    """The figures of the project's design page; the configuration is the real one."""
    size = target_size(DATA / "qwen3.6-27b")
    assert size.num_parameters == 26_895_998_464
    assert size.weight_bytes("bfloat16") == 53_791_996_928
    assert (size.num_layers, size.hidden_size, size.vocab_size) == (64, 5120, 248_320)
    assert bytes_per_token(size.hidden_size, 5) == 61_440
    # by hand: 2 x 248,320 x 5120; 64 MLPs of 3 x 5120 x 17,408; 16 full-attention layers with a gate in q_proj
    assert size.parameters["embedding"] == size.parameters["head"] == 248_320 * 5120
    assert size.parameters["MLP"] == 64 * 3 * 5120 * 17_408
    assert size.parameters["attention"] == 16 * (5120 * (12_288 + 2 * 1024) + 6144 * 5120 + 2 * 256)
    assert size.parameters["linear attention"] == 48 * (
        5120 * (10_240 + 6144 + 2 * 48) + 10_240 * 4 + 6144 * 5120 + 128 + 2 * 48)
    assert size.parameters["norms"] == (2 * 64 + 1) * 5120


@pytest.mark.parametrize("fixture", ["tiny_llama", "tiny_qwen3_5"])
def test_counts_equal_the_loaded_target(fixture, request):
    target = request.getfixturevalue(fixture)
    size = target_size(target.path)
    assert size.num_parameters == on_disk(target.path).num_parameters
    assert size.num_parameters == sum(p.numel() for p in target.model.parameters())
    assert size.weight_bytes(torch.float32) == sum(p.numel() * p.itemsize for p in target.model.parameters())
    assert ("head" in size.parameters) == (fixture == "tiny_qwen3_5"), "a tied head is counted with the embedding"
    attention = sum(p.numel() for layer in target.layers for name, p in layer.named_parameters()
                    if name.startswith("self_attn"))
    assert size.parameters["attention"] == attention


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_counts(family, tmp_path):
    """Text tower, to the byte: as instantiated on the meta device, as loaded, and as the files hold it; whatever else
    the files hold is counted as not loaded."""
    make_family(tmp_path, family)
    size = target_size(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text_tower(read_config(tmp_path), tmp_path))
    assert size.num_parameters == sum(p.numel() for p in model.parameters())
    assert size.num_parameters == on_disk(tmp_path).num_parameters
    stored = sum(t.num_values for t in Checkpoint.read(tmp_path).tensors.values())
    assert size.num_parameters + sum(size.not_loaded.values()) == stored
    assert set(size.not_loaded) == ({"vision"} if family in ("qwen3_5", "qwen3_5_moe", "gemma3") else set())


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next", "gpt_oss"])
def test_active_parameters_of_experts(family, tmp_path):
    """2 of 4 experts work on a token; routers and shared experts always do."""
    size = target_size(make_family(tmp_path, family))
    experts = sum(p.numel() for layer in load_target(tmp_path, audit="quick").layers
                  for p in layer.mlp.experts.parameters())
    assert size.parameters["experts"] == experts > 0
    assert size.num_parameters - size.num_active == experts // 2


def test_towers_that_are_not_loaded(tmp_path):
    """The miniature has both, under the real checkpoint's names; the real configuration has the published sizes."""
    size = target_size(make_miniature(tmp_path))
    stored = Checkpoint.read(tmp_path).tensors
    assert size.not_loaded == {
        "vision": sum(t.num_values for name, t in stored.items() if "visual" in name),
        "multi-token prediction": sum(t.num_values for name, t in stored.items() if name.startswith("mtp."))}
    real = target_size(DATA / "qwen3.6-27b")
    layer = 5120 * (12_288 + 2 * 1024) + 6144 * 5120 + 2 * 256 + 3 * 5120 * 17_408 + 2 * 5120
    assert real.not_loaded["multi-token prediction"] == layer + 2 * 5120**2 + 3 * 5120
    assert real.not_loaded["vision"] > 400e6 and real.num_active == real.num_parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_what_decoding_keeps(family, tmp_path):
    """Against the tensors of the very cache that Transformers fills, on rows longer than the sliding window."""
    target = load_target(make_family(tmp_path, family), audit="quick")
    cache = DynamicCache(config=target.config)
    for num_tokens in (70, 1):  # a prompt, then a token
        with torch.no_grad():
            target.model(torch.full((1, num_tokens), 5), **{cache_argument(target.model): cache})
    tensors = [tensor for layer in cache.layers for value in vars(layer).values()
               for tensor in (value.values() if isinstance(value, dict) else [value])
               if isinstance(tensor, torch.Tensor) and tensor.dim() > 1]
    state = decoding_state(tmp_path, 71, "float32")
    assert state.kv_cache + state.recurrent == sum(tensor.nbytes for tensor in tensors)
    assert (state.recurrent > 0) == ("linear_attention" in (getattr(target.config, "layer_types", None) or []))


def test_no_weights_are_read(tiny_llama_folder, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny_llama_folder / "config.json").read_bytes())
    assert target_size(tmp_path) == target_size(tiny_llama_folder)
    with pytest.raises(TargetError, match="no .*weights here"):
        on_disk(tmp_path)
    with pytest.raises(TargetError, match="no such model folder"):
        target_size(tmp_path / "none")
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(TargetError, match="not a causal language model"):
        target_size(tmp_path)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "intermediate_size", "num_key_value_heads",
                                  "linear_num_value_heads", "rope_parameters"])
def test_a_size_that_is_missing_is_not_made_up(family, name, tmp_path):
    """Transformers has defaults for all, which are those of no target of its user."""
    if family == "llama" and not name.startswith(("hidden", "num_hidden")):
        pytest.skip("Llama's files leave some out, and its defaults are meant")
    make_family(tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text())
    del config.get("text_config", config)[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for work in (target_size, lambda path: peak_memory.capture_memory(path, [0], 1, 8)):
        with pytest.raises(TargetError, match=f"names no {name}|`num_hidden_layers` .32. must be equal"):
            work(tmp_path)
    if "text_config" in config:  # the vision tower's width is not the target's
        del config["text_config"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(TargetError, match="names no hidden_size"):
            target_size(tmp_path)


def test_bytes_per_token_by_encoding():
    assert bytes_per_token(576, 5) == 6 * 576 * 2
    assert bytes_per_token(576, 5, last_state="none") == 5 * 576 * 2
    assert bytes_per_token(576, 5, encoding="bf16+zstd") == pytest.approx(6912 / 1.4)
    with pytest.raises(ValueError, match="encoding: 'int4' is not known"):
        bytes_per_token(576, 5, encoding="int4")
    with pytest.raises(ValueError, match="dtype 'float31'"):
        target_size(DATA / "qwen3.6-27b").weight_bytes("float31")


def test_disk_by_data_set_and_encoding():
    """DESIGN's 151 TB, and what Zstd leaves of them."""
    table = disk_table(5120, 5, [("one token", 1), ("full", 800_000 * 3072)])
    assert table.loc["full"].tolist() == ["2,457,600,000", "150.99 TB", "107.85 TB", "88.13 TB", "72.73 TB"]
    assert table.loc["one token", "bf16"] == "61.44 kB"


def write_conversations(path, num):
    path.write_text("".join(
        f'{{"id": "{i}", "messages": [{{"role": "user", "content": "What is rain?"}}, '
        f'{{"role": "assistant", "content": "{"a battery " * (i + 1)}"}}]}}\n' for i in range(num)))
    return path


@pytest.mark.parametrize("changes", [
    {}, {"max_length": 30}, {"max_length": 30, "too_long": "truncate"}, {"min_supervised": 20}, {"max_samples": 5}])
def test_data_size_counts_what_the_preparation_keeps(changes, tiny_llama, tmp_path):
    """With every conversation looked at it is no estimate: refused ones are left out, cut ones count as cut."""
    path = write_conversations(tmp_path / "c.jsonl", 12)
    options = PrepareOptions(**{"max_length": 10_000, "min_supervised": 1} | changes)
    size, rows = data_size(path, tiny_llama.tokenizer, options), prepare(path, tiny_llama.tokenizer, options)
    assert size.num_probed == changes.get("max_samples", 12) and size.num_conversations == len(rows)
    assert size.num_tokens == rows.num_tokens
    if "max_samples" not in changes:
        assert (len(rows) < 12) == (changes in ({"max_length": 30}, {"min_supervised": 20})), "a blunt test"


def test_data_size_of_probes_and_of_broken_files(tiny_llama, tmp_path):
    path = write_conversations(tmp_path / "c.jsonl", 12)
    options = PrepareOptions(max_length=10_000, min_supervised=1)
    lengths = prepare(path, tiny_llama.tokenizer, options).lengths
    size = data_size(path, tiny_llama.tokenizer, options, num_probes=4)
    assert size.num_probed == 4 and size.mean_length == lengths[::3].mean() and size.num_conversations == 12
    with pytest.raises(ConversationError, match="none of 12 conversations .*the first: longer than max_length"):
        data_size(path, tiny_llama.tokenizer, PrepareOptions(max_length=3))
    path.write_text("")
    with pytest.raises(ConversationError, match="holds no conversation"):
        data_size(path, tiny_llama.tokenizer, options)


def test_data_size_passes_over_malformed_rows_and_sees_a_file_that_was_cut_off(tiny_llama, tmp_path):
    path = write_conversations(tmp_path / "c.jsonl", 12)
    options = PrepareOptions(max_length=10_000, min_supervised=1)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, "{", lines[0]]) + "\n")
    size = data_size(path, tiny_llama.tokenizer, options)
    assert (size.num_conversations, size.num_probed) == (13, 14)
    path.write_text("\n".join([*lines, lines[0][:40]]))
    with pytest.raises(SourceError, match="line 13: not valid JSON.*cut off"):
        data_size(path, tiny_llama.tokenizer, options, num_probes=4)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("family", "values"), [
    ("llama", {"hidden_size": 0}), ("llama", {"num_attention_heads": 0, "head_dim": None}),
    ("llama", {"num_hidden_layers": 0}), ("llama", {"vocab_size": -5}), ("llama", {"num_key_value_heads": 0}),
    ("llama", {"hidden_act": "nonsense"}), ("llama", {"rope_parameters": {"rope_type": "nonsense"}}),
    ("qwen3_next", {"linear_num_value_heads": 0}), ("qwen3_next", {"linear_conv_kernel_dim": -1})])
def test_silly_values_are_one_clear_line(family, values, tmp_path):
    """Whatever Transformers' modelling code raises for them."""
    make_family(tmp_path, family)
    change_config(tmp_path, **values)
    for work in (target_size, lambda path: peak_memory.capture_memory(path, [0], 1, 8)):
        with pytest.raises(TargetError, match="config.json"):
            work(tmp_path)


def test_resources_of_this_machine(tmp_path, monkeypatch):
    found = resources(tmp_path / "not" / "there" / "yet")
    assert found.memory_free > 0 and found.disk_for_states == found.disk_free > 0
    assert found.num_cpus >= 1
    monkeypatch.setattr(memory, "cgroup_free", lambda: iter([1234]))
    assert resources(tmp_path).memory_free == 1234, "a container's limit counts when it is tighter"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for device in ("cuda:0", "gpu"):
        with pytest.raises(TargetError, match=f"device '{device}' cannot be used"):
            resources(tmp_path, device)


def test_the_shards_that_a_store_holds_are_room_for_it(tmp_path):
    """A finished store on a full disk fits, when the notebook is repeated."""
    for name, size in (("shard-00000.h5", 3000), ("shard-00001.h5", 500), (".shard-00002.h5.host.1.partial", 70)):
        (tmp_path / name).write_bytes(b"x" * size)
    found = resources(tmp_path)
    assert found.disk_stored == 3500 and found.disk_for_states == found.disk_free + 3500


def test_a_containers_own_memory_limit(tmp_path):
    assert list(memory.cgroup_free(tmp_path)) == []
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("300\n")
    assert list(memory.cgroup_free(tmp_path)) == []
    (tmp_path / "memory.max").write_text("1000\n")
    assert list(memory.cgroup_free(tmp_path)) == [700]
