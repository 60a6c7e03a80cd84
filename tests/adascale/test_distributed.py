"""Two gloo ranks equal accumulation on one process, and the ranks agree."""

import pytest
import torch

from adaecho import AdaScale
from tests.adascale import two_ranks
from tests.adascale.helpers import assert_identical, backward, batches, mlp, train, weights
from tests.forks import FORKS

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="torch is built without gloo",
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.start_processes(
        two_ranks.main, args=(str(folder),), nprocs=two_ranks.NUM_RANKS, start_method=FORKS.get_start_method()
    )
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(two_ranks.NUM_RANKS)]


SIX = ("ddp_6", "no_sync_6", "bucket_view_6", "not_divided_6", "zero_redundancy_groups_6")


@pytest.mark.parametrize("name", ["ddp_2", "static_graph", "bucket_view", "zero_redundancy", *SIX])
def test_equals_accumulation_on_one_process(outcomes, name):
    model, num_micro_batches = mlp(), 6 if name in SIX else 4 if name == "bucket_view" else 2
    parameters = two_ranks.two_groups(model) if "groups" in name else model.parameters()
    optimizer = AdaScale(two_ranks.sgd(parameters), num_gradients_to_accumulate=num_micro_batches)
    gains = train(model, optimizer, batches(5, num_micro_batches))
    for outcome in outcomes:
        assert outcome[name]["gains"] == pytest.approx(gains, rel=1e-9)
        torch.testing.assert_close(outcome[name]["weights"], weights(model))
    assert_identical(outcomes[0][name]["weights"], outcomes[1][name]["weights"])
    assert outcomes[0][name]["gains"] == outcomes[1][name]["gains"]


def test_sharded_optimizer_state_equals_unsharded_bit_for_bit(outcomes):
    for outcome in outcomes:
        assert outcome["zero_redundancy"]["gains"] == outcome["ddp_2"]["gains"]
        assert_identical(outcome["zero_redundancy"]["weights"], outcome["ddp_2"]["weights"])
    model = mlp()
    optimizer = AdaScale(two_ranks.sgd(model.parameters()), num_gradients_to_accumulate=2)
    optimizer.load_state_dict(outcomes[0]["zero_redundancy"]["state"])
    assert optimizer.gain() == outcomes[0]["zero_redundancy"]["gains"][-1]


def test_a_parameter_that_one_rank_does_not_use(outcomes):
    torch.manual_seed(1)
    model = two_ranks.Branches(0)
    optimizer = AdaScale(two_ranks.sgd(model.parameters()), num_gradients_to_accumulate=2)
    for number, micro_batches in enumerate(batches(4, 2)):
        optimizer.zero_grad()
        for model.rank, (x, y) in enumerate(micro_batches):
            (torch.nn.functional.cross_entropy(model(x), y) / 2).backward()
        for outcome in outcomes:
            assert outcome["branches"]["gains"][number] == pytest.approx(optimizer.gain(), rel=1e-9)
        optimizer.step()
    for outcome in outcomes:
        torch.testing.assert_close(outcome["branches"]["weights"], weights(model))


def test_all_ranks_skip_a_step_that_was_not_finite_on_one(outcomes):
    for outcome in outcomes:
        assert_identical(outcome["overflow"]["after_bad"], outcome["overflow"]["weights"])
        assert outcome["overflow"]["last"]["skipped"] == 1
    assert_identical(outcomes[0]["overflow"]["last"], outcomes[1]["overflow"]["last"])


def test_world_size_1_uses_the_statistics_of_one_rank(outcomes):
    for rank, outcome in enumerate(outcomes):
        model = mlp()
        optimizer = AdaScale(two_ranks.sgd(model.parameters()), num_gradients_to_accumulate=2)
        backward(model, two_ranks.share(next(batches(1, 4)), rank))
        assert outcome["one_rank"] == optimizer.gain()


def test_hooks_copy_no_gradient(outcomes):
    assert [outcome["copied"] for outcome in outcomes] == [0, 0]


def test_adascale_created_before_init_process_group_takes_no_step(outcomes):
    for outcome in outcomes:
        assert (
            "created with 1 rank(s), but torch.distributed now has 2; create it after init_process_group"
            in outcome["early"]
        )


@pytest.mark.parametrize("name", ["fsdp", "fsdp_original_parameters", "fsdp2"])
def test_sharded_parameters_are_refused(outcomes, name):
    assert all("a parameter is sharded" in outcome["refusals"][name] for outcome in outcomes)
