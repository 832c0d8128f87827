"""Cyclic sharing: the encoder runs its few distinct layers in turn, ABAB (Takase and Kiyono, 2021)."""

import torch

from bertblocks import BertBlocksConfig, BertBlocksForMaskedLM, register_sharing


@register_sharing("cyclic")
class CyclicSharing:
    """The sets of weights follow each other and start again: ABAB (Takase and Kiyono, 2021)."""

    evidence = "Saves parameters and time in translation (arXiv 2104.06022); we know of no result for encoders alone."

    @staticmethod
    def group(index: int, num_layers: int, num_groups: int) -> int:
        return index % num_groups


if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    layers = {"num_hidden_layers": 6, "num_hidden_groups": 2}
    for sharing in ("consecutive", "cyclic"):
        model = BertBlocksForMaskedLM(BertBlocksConfig(**sizes, **layers, layer_sharing=sharing))
        order = "".join("AB"[group] for group in model.model.encoder.order)
        print(f"{sharing}: {order}, {len(model.model.encoder.layers)} layers with weights")

    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        losses.append(model.eval()(ids, attention_mask=ids != 0, labels=ids.masked_fill(ids == 0, -100)).loss)
        losses[-1].backward()
        optimizer.step()
    print(f"one step lowers the loss: {bool(losses[1] < losses[0])}")
