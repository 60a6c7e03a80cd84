"""What forks find imported, and their garbage collectors pass over: to look for garbage in it takes long.

``torch._dynamo`` is what DistributedDataParallel imports.
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
atexit.register(gc.unfreeze)  # or triton tells of what it finds leaked
