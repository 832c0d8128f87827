"""Two optimizers of other libraries in a recipe: SOAP, and AdamW with 8-bit states.

Put the two classes into a package of your own and name its module as an entry point of the group "bertblocks"; then
`bertblocks pretrain` knows them too. They need `pip install pytorch-optimizer bitsandbytes`.
"""

import tempfile
from pathlib import Path

from rich.console import Console
from torch import nn
from torch.optim import Optimizer

from bertblocks import pretrain, read_recipe, register_optimizer
from bertblocks.training.optimizer_sections import AdamW, OptimizerSection
from bertblocks.training.optimizers import decay_groups, trainable


@register_optimizer("soap")
class SOAP(OptimizerSection):
    """Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al., 2024), from pytorch-optimizer."""

    betas: list[float] = [0.95, 0.95]
    precondition_frequency: int = 10
    """Steps between updates of the eigenbasis."""

    def build(self, model: nn.Module) -> list[Optimizer]:
        from pytorch_optimizer import SOAP

        groups = decay_groups(trainable(model), self.weight_decay)
        frequency = self.precondition_frequency
        return [SOAP(groups, self.lr, (self.betas[0], self.betas[1]), precondition_frequency=frequency)]


@register_optimizer("adamw_8bit")
class AdamW8bit(AdamW):
    """AdamW whose moments take one byte per weight (Dettmers et al., 2021), from bitsandbytes."""

    def build(self, model: nn.Module) -> list[Optimizer]:
        from bitsandbytes.optim import AdamW8bit

        groups = decay_groups(trainable(model), self.weight_decay)
        return [AdamW8bit(groups, self.lr, (self.betas[0], self.betas[1]), self.eps)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "texts.txt"
        texts.write_text("".join(f"{animal} {n % 7} sleeps here\n" for n in range(100) for animal in ("cat", "dog")))
        settings = ["tokenizer.vocab_size=60", "phases=[{duration: 30, length: 32, batch_tokens: 256}]"]
        settings += ["model.config={hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2}"]
        settings += [f"corpus.sources=[{{name: pets, files: [{texts}], one_per: line}}]", "corpus.held_out=0.1"]
        for kind in ("soap", "adamw_8bit"):
            optimizer = f"optimizer={{kind: {kind}, lr: 5e-3}}"
            recipe = read_recipe("demo", [*settings, optimizer, f"run.folder={folder}/{kind}"])
            metrics = pretrain(recipe, Console(quiet=True)).metrics
            print(f"{kind}: loss {metrics['held_out_loss']:.2f}, unigram {metrics['unigram_loss']:.2f}")
