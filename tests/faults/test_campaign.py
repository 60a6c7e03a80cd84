"""The short form of the campaign; ``python -m tests.faults.campaign`` is the long one."""

import pytest

from tests.faults.campaign import Campaign
from tests.needs import first_form


@pytest.fixture(scope="module", params=first_form(2, also=[1]))  # 1 draws COCO, whose checkpoints are large
def campaign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    """One for all kinds of faults, which compare with the same undisturbed runs."""
    return Campaign(tmp_path_factory.mktemp("campaign"), seed=request.param)


@pytest.mark.parametrize(
    ("kind", "faults"),
    [("killed", 6), ("damaged", 6), ("filled", 2), ("workload", 2), ("changed", 1), ("cached", 1)],
    ids=["kills", "damages", "full disks", "workloads", "changed data", "damaged caches"],
)
def test_no_fault_changes_a_run_in_silence(campaign: Campaign, kind: str, faults: int) -> None:
    campaign.tell(kind, getattr(campaign, kind), until=faults)
    outcome = campaign.outcomes[kind]
    assert outcome["faults"] >= faults
    assert outcome["different"] == outcome["crashed"] == 0
    assert outcome["same"] + outcome["refused"] == outcome["stories"]
    assert outcome["refused"] == 0 or kind == "damaged"
    assert outcome["same"] > 0
