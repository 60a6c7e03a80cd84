"""The short form of the campaign; ``python -m tests.faults.campaign`` is the long one."""

import pytest

from tests.faults.campaign import Campaign


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    """All kinds of faults compare with the same undisturbed runs."""
    return Campaign(tmp_path_factory.mktemp("campaign"), seed=2)


@pytest.mark.parametrize(("kind", "faults"), [("killed", 12), ("filled", 3)])
def test_no_fault_changes_the_records_of_a_run(campaign: Campaign, kind: str, faults: int) -> None:
    campaign.run(kind, getattr(campaign, kind), faults)
    outcome = campaign.outcomes[kind]
    assert outcome["faults"] >= faults
    assert outcome["different"] == outcome["crashed"] == 0
    assert outcome["same"] == outcome["stories"] > 0
