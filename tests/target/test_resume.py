"""The partial file of a long job: what it refuses, and what a kill leaves of it."""

import json
import math

import pytest

from dflash_lib.target.resume import PartialFile


def begin(out, *lines, **settings):
    with PartialFile(out, {"seed": 0, **settings}) as partial:
        positions = [partial.append(line) for line in lines]
        partial.keep()
    return positions


def rows(out):
    with PartialFile(out, {"seed": 0}) as partial:
        return list(partial.rows(str))


def test_lines_are_kept_and_one_that_was_cut_short_is_not(tmp_path):
    out = tmp_path / "new" / "out"
    assert begin(out, '"ü"', '"b"') == [0, 5]
    assert rows(out) == [(0, "ü"), (5, "b")]
    with open(f"{out}.partial", "ab") as f:
        f.write('"cut ü'.encode()[:-1])
    with PartialFile(out, {"seed": 0}) as partial:
        assert len(list(partial.rows(str))) == 2
        assert partial.append('"c"') == 9
    assert rows(out)[2] == (9, "c")
    with PartialFile(out, {"seed": 0}) as partial:
        partial.remove()
    assert list(out.parent.iterdir()) == []


def test_other_settings_are_refused_and_change_nothing(tmp_path):
    begin(tmp_path / "out", '"a"')
    with pytest.raises(ValueError, match="out.partial: begun with other settings: .'seed': .0, 1.. .before, now"):
        PartialFile(tmp_path / "out", {"seed": 1})
    with pytest.raises(ValueError, match="'new': .None, 1."):
        PartialFile(tmp_path / "out", {"seed": 0, "new": 1})
    with PartialFile(tmp_path / "out", {"seed": 0, "new": 1}, {"new": 1}) as partial:
        assert len(list(partial.rows(str))) == 1
    assert json.loads((tmp_path / "out.partial.json").read_text()) == {"seed": 0, "new": 1}
    (tmp_path / "out.partial.json").unlink()
    with pytest.raises(ValueError, match="settings file out.partial.json is missing"):
        PartialFile(tmp_path / "out", {"seed": 0})


def test_one_process_at_a_time(tmp_path):
    with PartialFile(tmp_path / "out", {"seed": 0}):
        with pytest.raises(ValueError, match="out.partial: another process is writing it"):
            PartialFile(tmp_path / "out", {"seed": 0})
    assert rows(tmp_path / "out") == []


def test_a_finished_file_is_not_begun_again(tmp_path):
    (tmp_path / "out").write_text("x")
    with pytest.raises(ValueError, match="out: is there already"):
        PartialFile(tmp_path / "out", {"seed": 0})


def test_settings_that_cannot_be_written_leave_nothing(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        PartialFile(tmp_path / "out", {"temperature": math.nan})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", [b"garbage\n", b"\0\0\0\n", b"[1]\n", b"\xff\n"])
def test_a_damaged_line_is_named_and_nothing_is_lost(tmp_path, line):
    begin(tmp_path / "out", '"a"', '"b"')
    before = (tmp_path / "out.partial").read_bytes()
    (tmp_path / "out.partial").write_bytes(before[:4] + line + before[4:])
    with pytest.raises(ValueError, match="out.partial, line 2: damaged. Remove the lines from this one on .head -n 1"):
        rows(tmp_path / "out")
    assert (tmp_path / "out.partial").read_bytes() == before[:4] + line + before[4:]


def test_damaged_settings_and_a_file_in_the_place_of_a_folder(tmp_path):
    begin(tmp_path / "out", '"a"')
    (tmp_path / "out.partial.json").write_text("[]")
    with pytest.raises(ValueError, match="out.partial.json: damaged"):
        rows(tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file, so no folder can be made there"):
        begin(tmp_path / "file" / "below" / "out")
