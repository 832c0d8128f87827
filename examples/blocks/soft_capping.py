"""Soft-capping: attention scores approach a limit instead of growing without bound (Gemma 2, 2024)."""

import torch
from torch import Tensor, nn

from bertblocks import BertBlocksConfig, BertBlocksForMaskedLM, Key, register_attention_fn
from bertblocks.nn.backends.eager import masked_softmax


@register_attention_fn("soft_capping")
class SoftCapping(nn.Module):
    """softmax(c * tanh(s / c)) of the scores s, position biases included (Gemma 2, 2024)."""

    evidence = "Part of Gemma 2 (arXiv 2408.00118), a decoder; Gemma 3 replaced it by norms of queries and keys."
    keys = {"attention_score_cap": Key(float, 50.0, "Limit c of all scores.", above=0, per_layer=True)}

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    @classmethod
    def from_config(cls, config: BertBlocksConfig) -> "SoftCapping":
        return cls(config.attention_score_cap)

    def forward(self, scores: Tensor, visible: Tensor) -> Tensor:
        return masked_softmax(self.cap * torch.tanh(scores / self.cap), visible)


if __name__ == "__main__":
    torch.manual_seed(0)
    # large weights, so that the cap has something to do
    config = BertBlocksConfig.from_preset("mini", initializer_range=0.5, attention_fn="soft_capping")
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    for cap in (50.0, 1.0):
        config.attention_score_cap = cap
        model = BertBlocksForMaskedLM(config)
        weights = model.eval()(ids, attention_mask=ids != 0, output_attentions=True).attentions[0][0]
        ratio = (weights.amax(-1) / weights.amin(-1)).max()
        print(f"cap {cap:g}: the weights of a query differ by up to a factor of {ratio:.2g}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(2):
        losses.append(model(ids, attention_mask=ids != 0, labels=ids.masked_fill(ids == 0, -100)).loss)
        losses[-1].backward()
        optimizer.step()
    print(f"one step lowers the loss: {bool(losses[1] < losses[0])}")
