"""A worker module for tests/test_launch.py: does what its first argument says."""

import os
import signal
import sys
import time

from dflash_lib.launch import report_progress, run_worker


def main() -> None:
    what, rank = sys.argv[1], int(os.environ["RANK"])
    report_progress(rank=rank, pid=os.getpid(), parent=os.getppid(), threads=os.environ["OMP_NUM_THREADS"],
                    agent=os.environ.get("DFLASH_AGENT"), gpus=os.environ.get("DFLASH_GPUS"))
    print(f"plain output of rank {rank}")
    if what == "fail" and rank == 1:
        raise ValueError("the disk of rank one is full")
    if what in ("empty", "cut"):
        print("words of a rank whose error file is empty")
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w", encoding="utf-8") as file:
            file.write({"empty": "", "cut": '{"message": {"message": "RuntimeError: disk'}[what])
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what in ("sleep", "fail"):
        time.sleep(600)


if __name__ == "__main__":
    run_worker(main)
