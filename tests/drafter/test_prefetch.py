"""Prefetched: items in order, no further ahead than it says, errors where they belong, and no thread left over."""

import subprocess
import sys
import threading
import traceback
import weakref

import pytest
import torch

from dflash_lib.drafter.prefetch import Prefetched

SOON = 20.0  # seconds that a test waits for what happens at once, before it fails


class Maker:
    """Makes 10 * number, of each number on its own word (`allow`) or at once; notes what was begun, and where."""

    def __init__(self, at_once: bool = True):
        self.begun: list[int] = []
        self.threads: set[threading.Thread] = set()
        self.changed = threading.Condition()
        self.allowed = 1 << 30 if at_once else 0

    def __call__(self, number: int) -> int:
        with self.changed:
            self.begun.append(number)
            self.threads.add(threading.current_thread())
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: len(self.begun) <= self.allowed, SOON)
        return 10 * number

    def allow(self, num: int = 1) -> None:
        with self.changed:
            self.allowed += num
            self.changed.notify_all()

    def wait_begun(self, num: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) >= num, SOON), self.begun


def is_idle(items: Prefetched) -> bool:
    """Whether the thread waits for room: it then sits in its condition's wait, with no item begun."""
    with items._changed:
        return len(items._changed._waiters) == 1


def wait_idle(items: Prefetched) -> None:
    for _ in range(int(SOON / 0.005)):
        if is_idle(items):
            return
        threading.Event().wait(0.005)
    raise AssertionError("the thread never came to rest")


def test_the_thread_takes_one_core_and_leaves_the_loop_its_own():
    """Else two OpenMP teams fight for the cores: a training on two was slower with loading hidden than without."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with Prefetched(lambda number: torch.get_num_threads(), 0, 3) as items:
            assert [items.next() for _ in range(4)] == [1] * 4
            assert torch.get_num_threads() == 3
        found = []
        later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert found == [3] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_no_room_at_all_is_refused():
    with pytest.raises(ValueError, match="depth: 0"):
        Prefetched(Maker(), 0, 5, depth=0)


def test_asking_outside_the_block_or_for_too_much_is_refused():
    items = Prefetched(Maker(), 3, 4)
    with pytest.raises(ValueError, match="item 3: asked for outside"):
        items.next()
    with items:
        assert [items.next(), items.next()] == [30, 40]
        with pytest.raises(ValueError, match="item 5: the last one is 4"):
            items.next()
    with pytest.raises(ValueError, match="outside"):
        items.next()
    with pytest.raises(ValueError, match="entered before"), items:
        pass


def test_no_items_at_all():
    with Prefetched(Maker(), 5, 4) as items, pytest.raises(ValueError, match="item 5: the last one is 4"):
        items.next()


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_items_come_in_order_from_one_other_thread(depth):
    maker = Maker()
    with Prefetched(maker, 5, 204, depth) as items:
        assert [items.next() for _ in range(200)] == list(range(50, 2050, 10))
    assert maker.begun == list(range(5, 205))
    assert len(maker.threads) == 1 and threading.current_thread() not in maker.threads


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nothing_is_made_further_ahead_than_depth(depth):
    maker = Maker()
    with Prefetched(maker, 0, 100, depth) as items:
        for taken in range(5):
            maker.wait_begun(taken + depth)
            wait_idle(items)
            assert maker.begun == list(range(taken + depth)), "beside the one that the loop has"
            assert items.next() == 10 * taken


def test_items_are_let_go():
    class Item:
        pass

    made = []

    def make(_number: int) -> Item:
        item = Item()
        made.append(weakref.ref(item))
        return item

    with Prefetched(make, 0, 50, depth=2) as items:
        for taken in range(1, 20):
            item = items.next()
            wait_idle(items)
            assert [i for i, ref in enumerate(made) if ref() is not None] == [taken - 1, taken, taken + 1]
        del item
    assert all(ref() is None for ref in made)


def test_the_thread_keeps_nothing_of_the_item_before_the_one_that_it_makes():
    class Item:
        pass

    made, second, go_on = [], threading.Event(), threading.Event()

    def make(number: int) -> Item:
        if number == 1:
            second.set()
            assert go_on.wait(SOON)
        made.append(weakref.ref(item := Item()))
        return item

    with Prefetched(make, 0, 3) as items:
        assert second.wait(SOON)
        item = items.next()
        del item
        assert made[0]() is None
        go_on.set()


def test_an_exception_comes_where_its_item_would_with_its_traceback():
    def breaks_in_here(number: int) -> int:
        raise RuntimeError(f"no item {number}")

    made = []

    def make(number: int) -> int:
        made.append(number)
        return number if number < 2 else breaks_in_here(number)

    with Prefetched(make, 0, 10, depth=5) as items:
        assert [items.next(), items.next()] == [0, 1], "what was made before it is given"
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no item 2") as caught:
                items.next()
            assert "breaks_in_here" in "".join(traceback.format_exception(caught.value))
        assert made == [0, 1, 2], "nothing is made after it"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit(3), StopIteration])
def test_not_only_errors_are_passed_on(error):
    def make(_number: int) -> int:
        raise error

    with Prefetched(make, 0, 10) as items, pytest.raises(error if isinstance(error, type) else type(error)):
        items.next()


@pytest.mark.parametrize("taken", [0, 3])
@pytest.mark.parametrize("how", ["full", "error", "at once"])
def test_leaving_early_ends_the_thread(taken, how):
    maker, before = Maker(), threading.active_count()

    def loop() -> None:
        with Prefetched(maker, 0, 1 << 40) as items:
            for _ in range(taken):
                items.next()
            if how != "at once":
                wait_idle(items)
            if how == "error":
                raise OSError("the loop's own")

    if how == "error":
        with pytest.raises(OSError, match="the loop's own"):
            loop()
    else:
        loop()
    assert threading.active_count() == before and not any(thread.is_alive() for thread in maker.threads)
    assert taken <= len(maker.begun) <= taken + 2


def test_leaving_while_an_item_is_made_waits_for_that_one_and_makes_no_other():
    maker = Maker(at_once=False)
    with Prefetched(maker, 0, 100, depth=5):
        maker.wait_begun(1)
        threading.Timer(0.05, maker.allow, [100]).start()
    assert maker.begun == [0] and not any(thread.is_alive() for thread in maker.threads)


def test_wait_s_is_the_time_that_next_waited():
    """Against the making, which is held up until the loop waits, and not against a clock alone."""
    maker = Maker(at_once=False)
    with Prefetched(maker, 0, 100, depth=2) as items:
        maker.wait_begun(1)

        def later() -> None:
            for _ in range(int(SOON / 0.005)):  # until the loop does wait, and 50 ms more
                if is_idle(items):
                    break
                threading.Event().wait(0.005)
            threading.Event().wait(0.05)
            maker.allow(2)

        helper = threading.Thread(target=later)
        helper.start()
        assert items.next() == 0
        assert items.wait_s >= 0.05
        helper.join()
        maker.wait_begun(3)  # 1 is ready, 2 is held up
        assert items.next() == 10 and items.wait_s == 0.0, "it was ready"
        maker.allow(100)


@pytest.mark.parametrize("ending", ["", "sys.exit(0)", "raise SystemExit(0)"])
def test_a_block_that_is_never_left_does_not_keep_python_from_ending(ending):
    code = ("import sys, torch\nfrom dflash_lib.drafter.prefetch import Prefetched\n"
            "def make(number):\n    return torch.randn(200, 200, generator=torch.Generator()) @ torch.ones(200, 200)\n"
            "items = Prefetched(make, 0, 1 << 40, depth=3).__enter__()\nitems.next()\n" + ending)
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
