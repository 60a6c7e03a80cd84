"""A Transformer language model: the decoder of Vaswani et al., "Attention Is All You Need", 2017.

Unlike in the paper, layer norm comes before the attention and feed-forward nets, and after the last layer.
The output layer shares its weights with the input embedding.
"""

import math

import torch
from torch import nn
from torch.nn import functional


class Transformer(nn.Module):
    """The language model: token numbers, int64 [N, T], to logits, float [N, T, vocabulary].

    With V = vocabulary, d = width and f = feed_forward, it has V d + layers (4 d^2 + 2 d f + f + 5 d) + 2 d
    parameters.

    Args:
        vocabulary: number of tokens.
        width: d, a multiple of ``heads``.
        feed_forward: number of hidden units in the feed-forward net.
        dropout: dropout rate in training, after the embedding, attention and feed-forward nets.
    """

    def __init__(
        self, vocabulary: int, *, layers: int, width: int, feed_forward: int, heads: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, feed_forward, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = sinusoids(tokens.shape[1], self.width, tokens.device)
        x = self.dropout(self.embedding(tokens) * math.sqrt(self.width) + positions)
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.norm(x), self.embedding.weight)


class Layer(nn.Module):
    """Compute ``x + attention(norm(x))`` and then ``x + feed_forward(norm(x))`` for x of [N, T, width]."""

    def __init__(self, width: int, feed_forward: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, feed_forward), nn.Linear(feed_forward, width)
        self.dropout = nn.Dropout(dropout)
        for linear in (self.query_key_value, self.out, self.up, self.down):
            nn.init.xavier_uniform_(linear.weight)
        for linear in (self.up, self.down):
            nn.init.zeros_(linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self._attend(self.norm1(x)))
        x = x + self.dropout(self.down(functional.relu(self.up(self.norm2(x)))))
        return x

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.query_key_value(x).chunk(3, dim=-1)
        # Each part is reshaped from [N, T, width] to [N, heads, T, width / heads].
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


def sinusoids(length: int, width: int, device: torch.device) -> torch.Tensor:
    """Return the position encodings of the paper's section 3.5, float [length, width]: sines, cosines."""
    rates = torch.exp(-math.log(10_000) * torch.arange(0, width, 2, device=device) / width)
    angles = torch.arange(length, device=device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width]
