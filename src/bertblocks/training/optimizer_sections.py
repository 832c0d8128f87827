"""The optimizers that a recipe can name, with their keys. Their updates are in `training/optimizers.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from bertblocks.core.settings import Positive, RecipeError, Section, SectionRegistry

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

#: Optimizers by the name that `optimizer.kind` can hold.
OPTIMIZERS = SectionRegistry("optimizer.kind", default="adamw")
register_optimizer = OPTIMIZERS.register


class OptimizerSection(Section):
    """The keys that every optimizer has. Subclass it for one of your own, and build it in `build`."""

    kind: str = ""  # the name under which a subclass is registered
    #: Whether the `build` of this class gives every weight the learning rate that parametrization 'mup' asks for.
    follows_width: ClassVar[bool] = False
    lr: Positive = 1e-3
    """The peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay on matrices and embeddings. Norms, biases and scales do not decay."""
    clip: Positive | None = 1.0
    """The maximum global gradient norm. None means no clipping."""

    def build(self, model: nn.Module) -> list[Optimizer]:
        """The optimizers that together update every trainable parameter exactly once."""
        raise NotImplementedError

    def check_parametrization(self, name: str) -> None:
        """Raises if a parametrization needs learning rates by width and `build` does not set them."""
        builder = next(kind for kind in type(self).__mro__ if "build" in vars(kind))
        if name != "standard" and not vars(builder).get("follows_width", False):
            raise RecipeError(
                f"optimizer.kind is {self.kind!r}, which has no learning rates for parametrization {name!r}; adamw, "
                "stable_adamw and muon have."
            )


@register_optimizer("adamw")
class AdamW(OptimizerSection):
    follows_width: ClassVar[bool] = True
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.98]
    eps: Positive = 1e-6

    def build(self, model: nn.Module) -> list[Optimizer]:
        from bertblocks.training.optimizers import build_adamw, trainable

        return [build_adamw(model, trainable(model), self.lr, self.betas, self.eps, self.weight_decay)]


@register_optimizer("stable_adamw")
class StableAdamW(AdamW):
    """AdamW with updates clipped per tensor (Wortsman et al., 2023), which makes gradient clipping unnecessary."""

    follows_width: ClassVar[bool] = True
    clip: Positive | None = None

    def build(self, model: nn.Module) -> list[Optimizer]:
        from bertblocks.training import optimizers

        scales = optimizers.rate_scales(model)
        groups = optimizers.decay_groups(optimizers.trainable(model), self.weight_decay, scales)
        eps = self.eps * optimizers.gradient_scale(model)
        return [optimizers.StableAdamWOptimizer(groups, self.lr, self.betas, eps)]


@register_optimizer("muon")
class Muon(AdamW):
    """Orthogonalized momentum (Jordan et al., 2024) for the matrices inside layers, and AdamW for all other parameters.

    Updates are scaled to the size of AdamW's (Liu et al., 2025), so both share one learning rate and weight decay.
    """

    follows_width: ClassVar[bool] = True
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    orthogonalization: Literal["newton_schulz", "polar_express"] = "newton_schulz"
    """The coefficients of the iteration: fixed (Jordan et al., 2024), or new ones in each step (Amsel et al., 2025)."""
    qk_clip: Positive | None = None
    """Scales down queries and keys of heads with a logit above this (MuonClip; Kimi Team, 2025); 100 is usual."""

    def build(self, model: nn.Module) -> list[Optimizer]:
        from bertblocks.training.optimizers import MuonOptimizer, build_adamw, rate_scales, split_matrices

        matrices, others = split_matrices(model)
        options = (self.lr, self.momentum, self.weight_decay, self.orthogonalization, rate_scales(model))
        muon = [MuonOptimizer(matrices, *options)] if matrices else []
        optimizers = [*muon, build_adamw(model, others, self.lr, self.betas, self.eps, self.weight_decay)]
        if self.qk_clip is not None:
            from bertblocks.training.qk_clip import QKClip

            optimizers[-1].register_step_post_hook(QKClip(model, self.qk_clip))
        return optimizers
