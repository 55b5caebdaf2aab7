"""Names of drafters; what is evaluated is tested through `evaluate` (tests/report/test_evaluation_page.py)."""

import json

import pytest

from dflash_lib.decoding.comparison import compare_drafters, drafter_names
from dflash_lib.drafter import DrafterError


def folder(path, exported=False):
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"dflash_config": {}} if exported else {"drafter": {}}))
    return path


def test_drafters_are_called_by_their_run(tmp_path):
    one, two = folder(tmp_path / "one" / "drafter" / "best"), folder(tmp_path / "two" / "drafter" / "last")
    export = folder(tmp_path / "one" / "drafter" / "export" / "zlab", exported=True)
    lone = folder(tmp_path / "downloaded", exported=True)
    assert drafter_names([tmp_path / "one", two, export, lone]) == ["one", "two", "one (export)", "downloaded (export)"]
    again = folder(tmp_path / "more" / "one" / "drafter" / "best")
    assert drafter_names([one, again]) == [str(one), str(again)], "two of one name: the paths"
    with pytest.raises(DrafterError, match="given twice"):
        drafter_names([tmp_path / "one", one])


def test_one_prompt_is_not_enough():
    with pytest.raises(ValueError, match="at least two are needed"):
        compare_drafters(None, [], [None], 8)
