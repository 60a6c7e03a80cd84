"""The paper's claims, and the experiments that decide them. ``decisions.py`` has the decision rules."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """A claim of the paper: one configuration of an experiment is better than another, or no worse."""

    # By default, the claim is that the cost of ``arm`` is lower than the cost of ``other``.
    key: str  # short name
    section: str  # section of the paper
    says: str  # the claim in words
    experiment: str
    arm: str
    other: str
    no_harm: bool = False  # the claim is that the best metric of ``arm`` is no worse; costs do not matter
    cost: str = "fresh_examples"  # the kind of cost to compare; see records.outcome.searched_costs
    excess: float | None = None  # the claim is that the cost is higher by less than this fraction, e.g. 0.03


CLAIMS = (
    Claim("batch_saves", "3.1", "batch echoing at e = 2 needs fewer fresh examples than the baseline",
          "fig3", "batch_e2", "baseline"),
    Claim("after_saves", "3.1", "example echoing after augmentation at e = 2 needs fewer than the baseline",
          "fig3", "example_after_e2", "baseline"),
    Claim("before_saves", "3.1", "example echoing before augmentation at e = 2 needs fewer than the baseline",
          "fig3", "example_before_e2", "baseline"),
    Claim("example_beats_batch", "3.1", "example echoing (after augmentation) needs fewer than batch echoing",
          "fig3", "example_after_e2", "batch_e2"),
    Claim("earlier_beats_later", "3.1", "echoing before augmentation needs fewer than after it",
          "fig3", "example_before_e2", "example_after_e2"),
    Claim("time_saves", "3.2", "where reading takes longer than five steps, echoing at e = 5 takes less time",
          "fig4", "e5", "e1", cost="train_time_s"),
    Claim("time_follows_fresh", "3.2", "a fresh example takes at most 3% more time at e = 5 than at e = 1",
          "fig4", "e5", "e1", cost="s_per_fresh_example", excess=0.03),
    Claim("large_factor_saves", "3.3", "even e = 16 needs fewer fresh examples than the baseline",
          "fig5", "e16", "e1"),
    Claim("buffer_helps_batch", "3.5", "batch echoing needs fewer with repeated batches shuffled",
          "fig7a", "batch_e2_buffer16", "batch_e2_buffer0"),
    Claim("buffer_helps_example", "3.5", "example echoing needs fewer with a larger shuffle buffer",
          "fig7b", "example_after_e2_buffer1024", "example_after_e2_buffer64"),
    Claim("batch_no_harm", "3.6", "batch echoing at e = 4 ends no worse than the baseline",
          "fig8", "batch_e4", "baseline", no_harm=True),
    Claim("after_no_harm", "3.6", "example echoing after augmentation at e = 4 ends no worse",
          "fig8", "example_after_e4", "baseline", no_harm=True),
    Claim("before_no_harm", "3.6", "example echoing before augmentation at e = 4 ends no worse",
          "fig8", "example_before_e4", "baseline", no_harm=True),
    Claim("batch_no_harm_early", "3.6", "the same before the ceiling: batch echoing at e = 4",
          "fig8_early", "batch_e4", "baseline", no_harm=True),
    Claim("after_no_harm_early", "3.6", "before the ceiling: echoing after augmentation at e = 4",
          "fig8_early", "example_after_e4", "baseline", no_harm=True),
    Claim("before_no_harm_early", "3.6", "before the ceiling: echoing before augmentation at e = 4",
          "fig8_early", "example_before_e4", "baseline", no_harm=True),
)  # fmt: skip
