"""Exclusive self-attention (XSA): a token gets from attention only what its own value does not say."""

import torch
from torch import Tensor

from bertblocks import BertBlocksConfig, BertBlocksForMaskedLM, register_gate
from bertblocks.nn.backends.base import repeat_kv
from bertblocks.nn.gate import AttentionGate


@register_gate("exclusive")
class ExclusiveAttention(AttentionGate):
    """y - (y.v) v / |v|^2: in each head, the part of the output y along the token's own value v is removed."""

    evidence = "Positive for decoders up to 2.7B parameters (arXiv 2603.09078); we know of no result for encoders."

    @classmethod
    def from_config(cls, config: BertBlocksConfig) -> "ExclusiveAttention":
        return cls()

    def forward(self, attended: Tensor, x: Tensor, values: Tensor) -> Tensor:
        own = repeat_kv(values, attended.shape[1])  # [tokens, heads, head_dim]
        square = own.square().sum(-1, keepdim=True).clamp(min=1e-12)
        return attended - (attended * own).sum(-1, keepdim=True) / square * own


if __name__ == "__main__":
    torch.manual_seed(0)
    model = BertBlocksForMaskedLM(BertBlocksConfig.from_preset("mini", attention_gate="exclusive"))
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    cosines: list[Tensor] = []

    def record(gate: ExclusiveAttention, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        cosines.append(torch.cosine_similarity(output, inputs[2], dim=-1).abs().max())

    model.model.encoder.layers[0].attention.gate.register_forward_hook(record)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        losses.append(model.eval()(ids, attention_mask=ids != 0, labels=ids.masked_fill(ids == 0, -100)).loss)
        losses[-1].backward()
        optimizer.step()
    print(f"outputs of attention are orthogonal to the token's own value: {bool(max(cosines) < 1e-4)}")
    print(f"one step lowers the loss: {bool(losses[1] < losses[0])}")
