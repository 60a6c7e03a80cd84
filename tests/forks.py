"""Processes that a test may kill, forked from a server that has imported once what they need.

One server serves all tests of a process, and one list of modules: whichever was set last would hold for all.
"""

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([
    "adaecho.training.trial", "adaecho.tasks.digits",
    "torch._dynamo",  # DistributedDataParallel imports it, which takes seconds
])  # fmt: skip
