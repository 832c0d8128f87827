"""LayerScale: a learned factor per hidden unit on what attention and feed-forward add (Touvron et al., 2021)."""

import torch
from torch import Tensor, nn

from bertblocks import BertBlocksConfig, BertBlocksForMaskedLM, Key, register_residual


@register_residual("layer_scale")
class LayerScale(nn.Module):
    """x + g * f(x), with a learned vector g that starts small (Touvron et al., 2021)."""

    evidence = "Positive for deep image classifiers (arXiv 2103.17239); we know of no result for text encoders."
    keys = {"layer_scale_start": Key(float, 0.1, "First value of all factors.", above=0, per_layer=True)}

    def __init__(self, hidden_size: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.factors = nn.Parameter(torch.full((hidden_size,), start))

    @classmethod
    def from_config(cls, config: BertBlocksConfig) -> "LayerScale":
        return cls(config.hidden_size, config.layer_scale_start)

    def init_parameters(self, config: BertBlocksConfig) -> None:
        nn.init.constant_(self.factors, self.start)  # `config` is the model's; this layer may have its own start

    def forward(self, residual: Tensor, branch: Tensor) -> Tensor:
        return residual + self.factors * branch


if __name__ == "__main__":
    torch.manual_seed(0)
    config = BertBlocksConfig.from_preset("mini", norm_pos="pre", residual_fn="layer_scale", layer_scale_start=1e-4)
    model = BertBlocksForMaskedLM(config)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    states = model(ids, attention_mask=ids != 0, output_hidden_states=True).hidden_states
    print(f"the first layer changes its input by at most {(states[1] - states[0]).abs().max():.0e}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(ids, attention_mask=ids != 0, labels=ids.masked_fill(ids == 0, -100)).loss.backward()
    optimizer.step()
    factors = [module.factors for module in model.modules() if isinstance(module, LayerScale)]
    moved = sum(bool((vector != 1e-4).any()) for vector in factors)
    print(f"one step changed {moved} of {len(factors)} vectors of factors")
