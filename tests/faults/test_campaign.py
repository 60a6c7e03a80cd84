"""The short form of the campaign; ``python -m tests.faults.campaign`` is the long one."""

import pytest

from tests.faults.campaign import Campaign


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    """One for all kinds of faults, which compare with the same undisturbed runs."""
    return Campaign(tmp_path_factory.mktemp("campaign"), seed=2)


@pytest.mark.parametrize(("kind", "faults"), [("killed", 6), ("filled", 2)])
def test_no_fault_changes_a_run_in_silence(campaign: Campaign, kind: str, faults: int) -> None:
    campaign.tell(kind, getattr(campaign, kind), until=faults)
    outcome = campaign.outcomes[kind]
    assert outcome["faults"] >= faults
    assert outcome["different"] == outcome["crashed"] == 0
    assert outcome["same"] == outcome["stories"] > 0
