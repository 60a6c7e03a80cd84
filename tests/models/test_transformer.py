"""The Transformer: parameters counted by hand, causality, attention against its formula."""

import math

import pytest
import torch

from adaecho.models.transformer import Transformer, sinusoids


def _count(vocabulary: int, layers: int, d: int, f: int) -> int:
    """Query, key, value, output; two matrices with biases; two norms; the embedding; the last norm."""
    layer = 4 * d * d + (d * f + f) + (f * d + d) + 2 * (2 * d)
    return vocabulary * d + layers * layer + 2 * d


@pytest.mark.parametrize(
    ("vocabulary", "layers", "d", "f", "heads", "total"),
    [(4096, 2, 128, 512, 4, 920_064), (32_000, 6, 512, 2048, 8, 35_287_040)],
)
def test_parameters_are_those_counted_by_hand(
    vocabulary: int, layers: int, d: int, f: int, heads: int, total: int
) -> None:
    with torch.device("meta"):
        model = Transformer(vocabulary, layers=layers, width=d, feed_forward=f, heads=heads)
    assert sum(p.numel() for p in model.parameters()) == _count(vocabulary, layers, d, f) == total


def _small() -> Transformer:
    torch.manual_seed(0)
    return Transformer(20, layers=2, width=8, feed_forward=16, heads=2).eval()


def test_attention_is_causal() -> None:
    model, tokens = _small(), torch.randint(0, 20, (3, 10))
    before = model(tokens)
    tokens[:, 6:] = 0
    after = model(tokens)
    torch.testing.assert_close(after[:, :6], before[:, :6])
    assert not torch.allclose(after[:, 6:], before[:, 6:])


def test_attention_equals_the_formula_for_each_head() -> None:
    layer, x = _small().layers[0], torch.randn(1, 5, 8)
    query, key, value = (x[0] @ weight.T for weight in layer.query_key_value.weight.chunk(3))
    heads = []
    for h in (slice(0, 4), slice(4, 8)):
        scores = query[:, h] @ key[:, h].T / math.sqrt(4)
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ value[:, h])
    slow = torch.cat(heads, dim=1) @ layer.out.weight.T
    torch.testing.assert_close(layer._attend(x)[0], slow)


def test_positions_are_sines_and_cosines_of_geometric_rates() -> None:
    table = sinusoids(7, 6, torch.device("cpu"))
    for position in range(7):
        for i in range(3):
            angle = position / 10_000 ** (2 * i / 6)
            assert table[position, i].item() == pytest.approx(math.sin(angle), abs=1e-5)
            assert table[position, 3 + i].item() == pytest.approx(math.cos(angle), abs=1e-5)
