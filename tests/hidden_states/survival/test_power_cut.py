"""A power cut: what was not fsynced may be lost. Nothing of a complete job is; before that a resume makes it whole."""

import random
from pathlib import Path

import pytest

from tests.hidden_states.survival.folders import content
from tests.hidden_states.survival.io_events import Event
from tests.hidden_states.survival.power_cut import CONTENTS, NAMES, Disk, build, read_journal, states_after_cuts

NUM_CUTS = 60  # of some hundred different states: every one that no write led to, and a sample of the others
SEED = 5


@pytest.fixture(scope="module")
def record(server, small, tmp_path_factory):
    """Extracts the small rows, with protections taken out as asked for; returns (root, changes, folder)."""
    def call(*mutate):
        folder = tmp_path_factory.mktemp("record")
        (folder / "disk").mkdir()
        server.run("extract", store=folder / "disk" / "runs" / "store", prepared=small[1], log_dir=folder / "logs",
                   journal=folder / "journal.json", mutate=mutate)
        assert content(folder / "disk" / "runs" / "store") == content(small[2])
        return *read_journal(folder / "journal.json"), folder
    return call


@pytest.fixture(scope="module")
def recorded(record):
    return record()


def lost_after_the_end(root, events, truth: Path) -> list[str]:
    """What a cut after the job was reported as complete may do to the store: [] = nothing."""
    whole = {f"runs/store/{path.name}": path.read_bytes() for path in truth.iterdir()}
    whole |= {"runs": None, "runs/store": None}
    found = states_after_cuts(root, events, first=len(events))
    return [f"{where}: {damaged} lost or damaged" for where, state in found.items()
            if (damaged := sorted(name for name in whole if state.get(name, "") != whole[name]))]


def not_survived(server, small, folder: Path, root, events, chosen=None) -> list[str]:
    """Builds the states that cuts may leave, resumes each, and says which did not become the undisturbed store."""
    found = states_after_cuts(root, events)
    keys = list(found) if chosen is None else chosen(found)
    (folder / "cuts").mkdir()
    stores = []
    for number, key in enumerate(keys):
        build(found[key], folder / "cuts" / str(number))
        stores.append(folder / "cuts" / str(number) / "runs" / "store")
    raised = server.run("extract_each", stores=stores, prepared=small[1], log_dir=folder / "logs")
    truth = content(small[2])
    faults = []
    for key, store, error in zip(keys, stores, raised, strict=True):
        after = f"after {events[key[0] - 1].op} {Path(events[key[0] - 1].path).name}" if key[0] else "at once"
        if error or content(store) != truth:
            faults.append(f"{key} {after}: {error or 'other bytes'}")
    return faults


def sample_of(events, num: int):
    """Chooses states: all whose last change was no write, then others at random, `num` in all."""
    def choose(found):
        keys = list(found)
        others = [key for key in keys if key[0] == 0 or events[key[0] - 1].op not in ("write", "truncate")]
        writes = [key for key in keys if key not in set(others)]
        dice = random.Random(SEED)
        dice.shuffle(others)
        dice.shuffle(writes)
        return sorted(others[:num * 2 // 3] + writes[:num])[:num] if len(keys) > num else keys
    return choose


def test_the_journal_saw_every_change(recorded):
    """Played back it gives the very files: so nothing was written behind its back."""
    root, events, folder = recorded
    disk = Disk(root)
    for event in events:
        disk.apply(event)
    build(disk.after_cut("done", "kept"), folder / "played")
    assert content(folder / "played" / "runs" / "store") == content(folder / "disk" / "runs" / "store")
    assert len(states_after_cuts(root, events)) > 2 * NUM_CUTS


def test_nothing_of_a_complete_job_is_lost(recorded, small):
    root, events, _ = recorded
    assert lost_after_the_end(root, events, small[2]) == []


def test_a_resume_makes_a_store_whole_after_a_cut(recorded, server, small, tmp_path):
    root, events, _ = recorded
    assert not_survived(server, small, tmp_path, root, events, sample_of(events, NUM_CUTS)) == []


@pytest.mark.slow
def test_a_resume_makes_a_store_whole_after_every_cut(recorded, server, small, tmp_path):
    root, events, _ = recorded
    assert not_survived(server, small, tmp_path, root, events) == []


@pytest.mark.parametrize("mutation, loses, cannot_resume", [
    ("no_file_fsync", True, True),
    ("no_folder_fsync", True, False),  # what is lost is done again
    ("no_rename", False, True)])
def test_each_protection_is_needed(record, server, small, tmp_path, mutation, loses, cannot_resume):
    """Taken out of the code, the checks above fail: so they would see it."""
    root, events, _ = record(mutation)
    assert bool(lost_after_the_end(root, events, small[2])) == loses
    faults = not_survived(server, small, tmp_path, root, events, sample_of(events, NUM_CUTS // 2))
    assert bool(faults) == cannot_resume, faults
    assert all(": other bytes" in fault or ": StoreError: " in fault for fault in faults), faults


def test_the_model_of_the_disk_loses_what_was_not_synced():
    """Known cases: a file synced and renamed, with and without the folder's fsync, and one that was not synced."""
    def after(*events, names, contents):
        disk = Disk("/d")
        for op, path, *more in events:
            fields = dict(zip(("source", "data") if op == "replace" else ("data",), more, strict=False))
            disk.apply(Event(op, path, "after", **fields))
        return disk.after_cut(names, contents)

    write = [("create", "/d/a"), ("write", "/d/a", b"xyzw")]
    renamed = [*write, ("fsync", "/d/a"), ("replace", "/d/b", "/d/a")]
    for contents in CONTENTS:
        assert after(*renamed, names="done", contents=contents) == {"b": b"xyzw"}
        assert after(*renamed, names="undone", contents=contents) == {}
        for names in NAMES:
            assert after(*renamed, ("fsync-folder", "/d"), names=names, contents=contents) == {"b": b"xyzw"}
    unsynced = {contents: after(*write, names="done", contents=contents) for contents in CONTENTS}
    assert unsynced == {"lost": {"a": b""}, "zeros": {"a": bytes(4)}, "half": {"a": b"xy"}, "holes": {"a": b"xyzw"},
                        "kept": {"a": b"xyzw"}}
    below = [("mkdir", "/d/f"), ("create", "/d/f/a"), ("fsync", "/d/f/a"), ("fsync-folder", "/d/f")]
    assert after(*below, names="undone", contents="kept") == {}
    assert after(*below, ("fsync-folder", "/d"), names="undone", contents="kept") == {"f": None, "f/a": b""}
