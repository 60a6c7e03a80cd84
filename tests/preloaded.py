"""Modules that forks find imported, excluded from garbage collection.

DistributedDataParallel imports ``torch._dynamo``.
"""
# ruff: noqa: E402, F401

import atexit
import gc

gc.disable()

import pyarrow.parquet
import scipy.stats.qmc
import tokenizers
import torch._dynamo

import adaecho.run
import adaecho.search.worker
import adaecho.tasks.digits
import adaecho.tasks.imagenet
import adaecho.training.progress
import adaecho.training.trial

gc.freeze()
gc.enable()
atexit.register(gc.unfreeze)  # otherwise triton reports leaks
