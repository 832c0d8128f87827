"""alpha-entmax attention: weights that are exactly 0 for keys with low scores (Peters et al., 2019)."""

import torch
from torch import Tensor, nn

from bertblocks import BertBlocksConfig, BertBlocksForMaskedLM, Key, register_attention_fn


@register_attention_fn("entmax")
class Entmax(nn.Module):
    """max(0, (a - 1) s - t) ** (1 / (a - 1)), with t such that the weights of a query sum to 1."""

    evidence = "Its authors report that RoBERTa and ModernBERT keep their quality with it (arXiv 2502.12082)."
    keys = {"entmax_alpha": Key(float, 1.5, "a: near 1 for softmax, 2 for sparsemax.", above=1, most=2, per_layer=True)}

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.rate = alpha - 1

    @classmethod
    def from_config(cls, config: BertBlocksConfig) -> "Entmax":
        return cls(config.entmax_alpha)

    def power(self, x: Tensor, exponent: float) -> Tensor:
        return torch.where(x > 0, x.clamp(min=torch.finfo(x.dtype).tiny) ** exponent, 0.0)

    def forward(self, scores: Tensor, visible: Tensor) -> Tensor:
        x = self.rate * scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        with torch.no_grad():  # halve the interval of t until it is as small as the precision allows
            low = x.amax(-1, keepdim=True) - 1
            for step in range(1, 54):
                middle = low + 0.5**step
                low = torch.where(self.power(x - middle, 1 / self.rate).sum(-1, keepdim=True) >= 1, middle, low)
            slope = self.power(x - low, 1 / self.rate - 1).sum(-1, keepdim=True) / self.rate
        # a step of Newton's method changes t by almost nothing, but gives it the right gradient
        excess = self.power(x - low, 1 / self.rate).sum(-1, keepdim=True) - 1
        threshold = low + excess / slope.clamp(min=1.0)
        return self.power(x - threshold, 1 / self.rate).masked_fill(~visible, 0.0)


if __name__ == "__main__":
    torch.manual_seed(0)
    config = BertBlocksConfig.from_preset("mini", initializer_range=0.3, attention_fn="entmax")
    model = BertBlocksForMaskedLM(config).eval()
    ids = torch.arange(5, 37)[None]
    weights = model(ids, output_attentions=True).attentions[0]
    print(f"weights that are 0: {(weights == 0).float().mean():.0%}")
    print(f"sums of weights are 1: {torch.allclose(weights.sum(-1), torch.ones(1))}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(2):
        losses.append(model(ids, labels=ids).loss)
        losses[-1].backward()
        optimizer.step()
    print(f"one step lowers the loss: {bool(losses[1] < losses[0])}")
