import pytest
import torch

from dflash_lib.conversations.formats import ConversationError
from dflash_lib.conversations.sources import SourceError
from dflash_lib.conversations.templates import encode_conversation
from dflash_lib.target import memory
from dflash_lib.target.loading import TargetError
from dflash_lib.workbench.capacity import bytes_per_token, data_size, on_disk, resources, target_size
from tests.conftest import DATA


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


def test_bytes_per_token_by_encoding():
    assert bytes_per_token(576, 5) == 6 * 576 * 2
    assert bytes_per_token(576, 5, last=False) == 5 * 576 * 2
    assert bytes_per_token(576, 5, encoding="bf16+zstd") == pytest.approx(6912 / 1.4)
    with pytest.raises(ValueError, match="encoding 'int4' is not known"):
        bytes_per_token(576, 5, encoding="int4")
    with pytest.raises(ValueError, match="dtype 'float31'"):
        target_size(DATA / "qwen3.6-27b").weight_bytes("float31")


def write_conversations(path, num):
    path.write_text("".join(
        f'{{"id": "{i}", "messages": [{{"role": "user", "content": "What is rain?"}}, '
        f'{{"role": "assistant", "content": "{"a battery " * (i + 1)}"}}]}}\n' for i in range(num)))
    return path


def test_data_size_counts_what_will_be_used(tiny_llama, tmp_path):
    from dflash_lib.conversations.formats import read_conversations

    path = write_conversations(tmp_path / "c.jsonl", 12)
    lengths = [len(encode_conversation(tiny_llama.tokenizer, c)[0]) for c in read_conversations(path)]
    size = data_size(path, tiny_llama.tokenizer, None, max_length=10_000)
    assert (size.num_conversations, size.num_probed, size.num_tokens) == (12, 12, sum(lengths))
    limit = sorted(lengths)[7]
    size = data_size(path, tiny_llama.tokenizer, 5, max_length=limit)
    kept = [n for n in lengths if n <= limit]
    assert size.num_conversations == 5 and size.mean_length == sum(kept) / len(kept)
    size = data_size(path, tiny_llama.tokenizer, None, max_length=10_000, num_probes=4)
    assert size.num_probed == 4 and size.mean_length == sum(lengths[::3]) / 4
    with pytest.raises(ConversationError, match="none of 12 conversations"):
        data_size(path, tiny_llama.tokenizer, None, max_length=3)
    cut = data_size(path, tiny_llama.tokenizer, None, max_length=limit, too_long="truncate")
    assert (cut.num_conversations, cut.num_tokens) == (12, sum(min(n, limit) for n in lengths))


def test_data_size_passes_over_malformed_rows_and_sees_a_file_that_was_cut_off(tiny_llama, tmp_path):
    path = write_conversations(tmp_path / "c.jsonl", 12)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, "{", lines[0]]) + "\n")
    size = data_size(path, tiny_llama.tokenizer, None, max_length=10_000)
    assert (size.num_conversations, size.num_probed) == (13, 14)
    path.write_text("\n".join([*lines, lines[0][:40]]))
    with pytest.raises(SourceError, match="line 13: not valid JSON.*cut off"):
        data_size(path, tiny_llama.tokenizer, None, max_length=10_000, num_probes=4)
    path.write_text("")
    with pytest.raises(ConversationError, match="holds no conversation"):
        data_size(path, tiny_llama.tokenizer, None, max_length=10_000)


def test_resources_of_this_machine(tmp_path, monkeypatch):
    found = resources(tmp_path / "not" / "there" / "yet")
    assert found.memory_free > 0 and found.disk_for_states == found.disk_free > 0
    assert found.num_cpus >= 1
    monkeypatch.setattr(memory, "cgroup_free", lambda: iter([1234]))
    assert resources(tmp_path).memory_free == 1234, "a container's limit counts when it is tighter"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(TargetError, match="no CUDA device"):
        resources(tmp_path, "cuda:0")


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
