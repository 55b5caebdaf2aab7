"""Every expected number here is solved by hand, in the comments where it is not obvious."""

import pytest

from dflash_lib.files import write_json
from dflash_lib.report.figures_capacity import gpu_plan_figure
from dflash_lib.workbench.gpu_plan import (
    Limits,
    Rates,
    Strategy,
    Work,
    asked_for,
    epochs_table,
    measured_rates,
    plan_gpus,
    simulate,
    strategies,
)
from dflash_lib.workbench.runs import RunError, write_params

EVEN = Rates(extract_tokens_s=100, train_tokens_s=100, disk_write_mb_s=1e9, disk_read_mb_s=1e9)
HALF = Strategy(kind="stream", num_gpus=8, num_extracting=4)
CACHE = Strategy(kind="cache", num_gpus=8, num_extracting=8)


def work(epochs=1, **changes):
    """400 tokens/s for an hour: what four GPUs of EVEN do in one hour."""
    return Work(**{"num_tokens": 400 * 3600, "epochs": epochs, "bytes_per_token": 1000, **changes})


def test_half_and_half_of_equal_rates():
    """400 in, 400 out: one hour an epoch, nobody waits, nothing is stored."""
    outcome = simulate(HALF, work(), EVEN)
    assert (outcome.hours, outcome.gpu_hours, outcome.disk_bytes) == (1, 8, 0)
    assert outcome.starves == "nothing" and all(phase.busy == 1 for phase in outcome.phases)
    assert simulate(HALF, work(3), EVEN).hours == 3, "every epoch extracts again"


def test_everything_to_disk_first():
    """800 in for half an hour, 800 out for half an hour: a tie after one epoch, ahead from the second."""
    assert simulate(CACHE, work(), EVEN).hours == 1
    outcome = simulate(CACHE, work(2), EVEN)
    assert outcome.hours == 1.5 and outcome.disk_bytes == 400 * 3600 * 1000
    assert [(p.work, p.start, p.end) for p in outcome.phases] == [("extract", 0, 0.5), ("train", 0.5, 1.5)]


def test_the_first_epoch_streamed_and_kept():
    """One hour with half the GPUs each, then two epochs of half an hour with all of them."""
    outcome = simulate(Strategy(kind="keep", num_gpus=8, num_extracting=4), work(3), EVEN)
    assert outcome.hours == 2 and outcome.disk_bytes == 400 * 3600 * 1000
    assert [p.num_gpus for p in outcome.phases] == [4, 4, 8]


def test_who_starves():
    """Training four times as fast: trainers get 400 of 1,600 tokens/s and wait three quarters of the time."""
    fast = Rates(extract_tokens_s=100, train_tokens_s=400, disk_write_mb_s=1e9, disk_read_mb_s=1e9)
    outcome = simulate(HALF, work(), fast)
    assert outcome.hours == 1 and outcome.starves == "training GPUs wait for extraction 75% of the time"
    assert {p.work: p.busy for p in outcome.phases} == {"extract": 1, "train": 0.25}
    slow = Rates(extract_tokens_s=400, train_tokens_s=100, disk_write_mb_s=1e9, disk_read_mb_s=1e9)
    assert simulate(HALF, work(), slow).starves == "extracting GPUs wait for training 75% of the time"


def test_tensor_parallel():
    """Two GPUs at 70 % do 140 tokens/s: 400 / 140 hours, six trainers wait 1 - 140/600 of them."""
    outcome = simulate(Strategy(kind="stream", num_gpus=8, num_extracting=2, tensor_parallel=2), work(), EVEN)
    assert outcome.hours == pytest.approx(400 / 140)
    assert outcome.phases[1].busy == pytest.approx(140 / 600)


def test_a_slow_disk():
    """0.4 MB/s are 400 tokens/s: writing takes 1 hour instead of 1/2; reading at 0.2 takes 2 hours an epoch."""
    slow = Rates(extract_tokens_s=100, train_tokens_s=100, disk_write_mb_s=0.4, disk_read_mb_s=0.2)
    outcome = simulate(CACHE, work(2), slow)
    assert outcome.hours == 1 + 4
    assert outcome.starves == ("extracting GPUs wait for writing of the disk 50% of the time; "
                               "training GPUs wait for reading of the disk 75% of the time")


def test_loading_counts_for_each_kind_of_work():
    loading = Rates(extract_tokens_s=100, train_tokens_s=100, disk_write_mb_s=1e9, disk_read_mb_s=1e9, load_s=360)
    assert simulate(HALF, work(), loading).hours == pytest.approx(1.1)
    assert simulate(CACHE, work(), loading).hours == pytest.approx(1.2)


def test_the_winner_under_limits():
    """Without limits the cache wins from the second epoch; without the disk for it (1.44 GB) something streams."""
    assert plan_gpus(8, work(2), EVEN).winner == "C"
    small = plan_gpus(8, work(2), EVEN, Limits(disk_bytes=1e9))
    assert small.winner == "A" and "0.00144 of 0.001 TB disk" in small.table().loc["C", "verdict"]
    none = plan_gpus(8, work(2), EVEN, Limits(disk_bytes=1e9, hours=1.0))
    assert none.winner is None and none.sentence().startswith("Nothing fits the limits")
    assert plan_gpus(8, work(2), EVEN, Limits(hours=1.5)).winner == "C"


def test_the_best_other_split():
    """Extraction three times slower: 6 extract (200 tokens/s), 2 train (200): 2 hours, where half and half needs 3."""
    slow = Rates(extract_tokens_s=100 / 3, train_tokens_s=100, disk_write_mb_s=1e9, disk_read_mb_s=1e9)
    plan = plan_gpus(8, work(), slow, Limits(disk_bytes=0))
    assert plan.winner == "D" and plan.outcomes["D"].strategy.num_extracting == 6
    assert plan.outcomes["D"].hours == pytest.approx(2) and plan.outcomes["A"].hours == pytest.approx(3)


def test_epochs_make_caching_pay():
    table = epochs_table(8, work(), EVEN, Limits(), epochs=(1, 2, 4))
    assert table["winner"].tolist() == ["A", "C", "C"], "a tie in the first epoch goes to the one without a disk"
    assert table["A (GPU-hours)"].tolist() == ["8", "16", "32"] and table["C (GPU-hours)"].tolist() == ["8", "12", "20"]


@pytest.mark.parametrize("num_gpus", [1, 2, 3, 8])
def test_any_number_of_gpus(num_gpus):
    assert set(asked_for(num_gpus)) == {1: {"C"}, 2: {"A", "C"}}.get(num_gpus, {"A", "B", "C"})
    assert len(set(strategies(num_gpus))) == len(strategies(num_gpus))
    plan = plan_gpus(num_gpus, work(2), EVEN)
    assert plan.winner is not None and len(plan.table()) == len(plan.outcomes)
    assert gpu_plan_figure(plan).axes[0].patches


def test_bad_input():
    with pytest.raises(ValueError, match="4 of 4 GPUs cannot extract .* while others train"):
        Strategy(kind="stream", num_gpus=4, num_extracting=4)
    with pytest.raises(ValueError, match="in groups of 2"):
        Strategy(kind="cache", num_gpus=3, num_extracting=3, tensor_parallel=2)
    with pytest.raises(ValueError, match="train_tokens_s: a rate above 0"):
        Rates(extract_tokens_s=1, train_tokens_s=0, disk_write_mb_s=1, disk_read_mb_s=1)
    with pytest.raises(ValueError, match="at least one token and one epoch"):
        work(0)
    with pytest.raises(ValueError, match="num_gpus: at least 1"):
        plan_gpus(0, work(), EVEN)


def test_measured_rates_flow_into_the_next_plan(tmp_path):
    with pytest.raises(RunError, match="rates_from: .*no params.yaml"):
        measured_rates(tmp_path, EVEN)
    write_params(tmp_path, {})
    assert measured_rates(tmp_path, EVEN) == EVEN, "nothing was measured yet"
    write_json(tmp_path / "results" / "04_extract.json", {"results": {"tokens_per_second": 900.0, "num_workers": 2}})
    write_json(tmp_path / "results" / "06_train.json", {"results": {"tokens_per_second": 300.0, "num_workers": 1}})
    found = measured_rates(tmp_path, EVEN)
    assert (found.extract_tokens_s, found.train_tokens_s) == (450, 300)
    assert found.source == f"measured in {tmp_path.name} (04_extract, 06_train)"
    write_json(tmp_path / "results" / "04_extract.json", {"results": {"tokens_per_second": 0.0, "num_workers": 2}})
    found = measured_rates(tmp_path, EVEN)  # the store was complete already: nothing was measured
    assert (found.extract_tokens_s, found.train_tokens_s) == (100, 300)
