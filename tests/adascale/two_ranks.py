"""What two gloo ranks do, in one start of the processes; see test_distributed.py."""

import contextlib
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from adaecho import AdaScale
from tests.adascale.helpers import backward, batches, layers, mlp, weights

NUM_RANKS = 2
RATE = 0.05


def share(micro_batches, rank):
    """This rank's half of a step's micro-batches."""
    per_rank = len(micro_batches) // NUM_RANKS
    return micro_batches[rank * per_rank : (rank + 1) * per_rank]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def two_groups(model):
    """The layers apart, at rates of their own."""
    return layers(model, RATE, RATE / 3)


def train(model, optimizer, steps, rank, no_sync=False, is_scaled_loss=True):
    """The plain loop over this rank's share; gains, weights and counts at the end."""
    gains = []
    for micro_batches in steps:
        optimizer.zero_grad()
        mine = share(micro_batches, rank)
        for number, (x, y) in enumerate(mine):
            hold = no_sync and number < len(mine) - 1
            with model.no_sync() if hold else contextlib.nullcontext():
                (nn.functional.cross_entropy(model(x), y) / (len(mine) if is_scaled_loss else 1)).backward()
        gains.append(optimizer.gain())
        if not is_scaled_loss:
            optimizer.scale_grad_by_num_grads_to_accum()
        optimizer.step()
    counts = {"tau": optimizer.scale_invariant_steps, "skipped": optimizer.skipped_steps}
    return {"gains": gains, "weights": weights(model), **counts}


def ddp(rank, count, no_sync=True, model=None, sharded=None, is_scaled_loss=True, **arguments):
    """Five steps of so many micro-batches on both ranks together."""
    model = mlp() if model is None else model
    inner = sgd(model.parameters()) if sharded is None else sharded
    per_rank = count // NUM_RANKS
    optimizer = AdaScale(inner, num_gradients_to_accumulate=per_rank, is_scaled_loss=is_scaled_loss)
    wrapped = DistributedDataParallel(model, **arguments)
    outcome = train(wrapped, optimizer, batches(5, count), rank, no_sync, is_scaled_loss)
    if count == 2 and sharded is not None:
        sharded.consolidate_state_dict(to=0)
        outcome["state"] = optimizer.state_dict() if rank == 0 else None
    return outcome


def zero_redundancy(rank, count, groups):
    model = mlp()
    sharded = ZeroRedundancyOptimizer(groups(model), torch.optim.SGD, lr=RATE, momentum=0.9)
    return ddp(rank, count, model=model, sharded=sharded)


class Branches(nn.Module):
    """A second layer that only rank 0 uses."""

    def __init__(self, rank):
        super().__init__()
        self.trunk, self.extra, self.rank = mlp(), nn.Linear(5, 3).double(), rank

    def forward(self, x):
        return self.trunk(x) + self.extra(x) if self.rank == 0 else self.trunk(x)


def branches(rank):
    torch.manual_seed(1)
    model = Branches(rank)
    optimizer = AdaScale(sgd(model.parameters()))
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    return train(wrapped, optimizer, batches(4, 2), rank)


def overflow_on_rank_1(rank):
    model = mlp()
    optimizer = AdaScale(sgd(model.parameters()), num_gradients_to_accumulate=2)
    wrapped = DistributedDataParallel(model)
    steps = list(batches(3, 4))
    outcome = train(wrapped, optimizer, steps[:1], rank)
    x, y = steps[1][2]
    bad = [*steps[1][:2], (x * float("nan"), y), steps[1][3]]  # the third micro-batch is rank 1's
    train(wrapped, optimizer, [bad], rank)
    outcome["after_bad"] = weights(model)
    outcome |= {"last": train(wrapped, optimizer, steps[1:], rank)}
    return outcome


def refusals():
    mesh, cpu = dist.device_mesh.init_device_mesh("cpu", (NUM_RANKS,)), torch.device("cpu")
    models = {
        "fsdp": FullyShardedDataParallel(mlp(), device_id=cpu),
        "fsdp_original_parameters": FullyShardedDataParallel(mlp(), device_id=cpu, use_orig_params=True),
        "fsdp2": fully_shard(mlp(), mesh=mesh),
    }
    refused = {name: partial(AdaScale, sgd(model.parameters())) for name, model in models.items()}
    messages = dict.fromkeys(refused, "")
    for name, build in refused.items():
        try:
            build()
        except ValueError as error:
            messages[name] = str(error)
    return messages


def statistics_of_one_rank(rank):
    """world_size=1 where there are two: each rank's own gain."""
    model = mlp()
    optimizer = AdaScale(sgd(model.parameters()), world_size=1, num_gradients_to_accumulate=2)
    backward(model, share(next(batches(1, 4)), rank))
    return optimizer.gain()


def copied_gradients(rank):
    """Gradients of a first pass that autograd had to copy into .grad."""
    model, came = mlp(), {}
    optimizer = AdaScale(sgd(model.parameters()))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient, key=parameter: came.update({key: gradient.data_ptr()}))
    backward(DistributedDataParallel(model), share(next(batches(1, 2)), rank))
    optimizer.step()
    return sum(parameter.grad.data_ptr() != came[parameter] for parameter in model.parameters())


def made_too_early(rank, model, optimizer):
    """The message of a step where there were no ranks yet when AdaScale was made."""
    before = weights(model)
    backward(DistributedDataParallel(model), share(next(batches(1, 4)), rank))
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error) if all(map(torch.equal, weights(model), before)) else "stepped"
    return ""


def everything(rank):
    """All outcomes of one rank by name."""
    return {
        "ddp_2": ddp(rank, 2, no_sync=False),
        "ddp_6": ddp(rank, 6, no_sync=False),
        "no_sync_6": ddp(rank, 6),
        "static_graph": ddp(rank, 2, no_sync=False, static_graph=True),
        "bucket_view": ddp(rank, 4, gradient_as_bucket_view=True),
        "bucket_view_6": ddp(rank, 6, no_sync=False, gradient_as_bucket_view=True),
        "not_divided_6": ddp(rank, 6, is_scaled_loss=False),
        "zero_redundancy": zero_redundancy(rank, 2, nn.Module.parameters),
        "zero_redundancy_groups_6": zero_redundancy(rank, 6, two_groups),
        "branches": branches(rank),
        "overflow": overflow_on_rank_1(rank),
        "one_rank": statistics_of_one_rank(rank),
        "copied": copied_gradients(rank),
        "refusals": refusals(),
    }


def main(rank, folder):
    """Runs ``everything`` on one rank and leaves its outcomes in ``folder``."""
    torch.set_num_threads(1)
    early = mlp()
    optimizer = AdaScale(sgd(early.parameters()), num_gradients_to_accumulate=2)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS
    )
    try:
        outcomes = {"early": made_too_early(rank, early, optimizer), **everything(rank)}
        torch.save(outcomes, f"{folder}/rank{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
