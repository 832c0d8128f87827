"""Optimizers, tested against their formulas and torch's implementations."""

import math
from typing import Any

import pytest
import torch

from bertblocks.training.optimizer_sections import AdamW, Muon, StableAdamW
from bertblocks.training.optimizers import (
    ADAMW_UPDATE_SIZE,
    ITERATIONS,
    MuonOptimizer,
    RowAdamW,
    StableAdamWOptimizer,
    gradient_values,
    orthogonalize,
)
from tests.training.helpers import make_model


def draw_gradient(rows: list[int]) -> torch.Tensor:
    """A gradient of a table of 12 rows, with two entries for the first row, as for a word that occurs twice."""
    indices = [rows[0], *rows]
    values = torch.randn(len(indices), 5)
    return torch.sparse_coo_tensor(torch.tensor([indices]), values, (12, 5), check_invariants=True)


#: The rows that have a gradient in each step. Row 11 never has one.
STEPS = [[3, 7], [7, 0], [10, 3, 1], [5], [2, 4, 6, 8, 9], [3]]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_row_adamw_equals_torchs_adamw_on_rows_from_their_first_gradient(decay: float) -> None:
    """Rows with a gradient in the first step are those of AdamW; without decay all rows are."""
    start = torch.randn(12, 5)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    row_adamw, adamw = RowAdamW([ours], 0.01, weight_decay=decay), torch.optim.AdamW([theirs], 0.01, weight_decay=decay)
    for rows in STEPS:
        ours.grad = draw_gradient(rows)
        theirs.grad = ours.grad.to_dense()
        row_adamw.step()
        adamw.step()
    same = [3, 7] if decay else list(range(12))
    torch.testing.assert_close(ours[same], theirs[same])
    assert torch.equal(ours[11], start[11])
    assert (ours[:11] != start[:11]).all()


def test_row_adamw_goes_on_after_and_before_dense_gradients() -> None:
    start = torch.randn(12, 5)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    row_adamw, adamw = RowAdamW([ours], 0.01, weight_decay=0.0), torch.optim.AdamW([theirs], 0.01, weight_decay=0.0)
    for step, rows in enumerate(STEPS):
        gradient = draw_gradient(rows)
        ours.grad = gradient.to_dense() if step in (2, 3) else gradient
        theirs.grad = gradient.to_dense()
        row_adamw.step()
        adamw.step()
    torch.testing.assert_close(ours, theirs)


def test_sparse_gradients_are_measured_and_scaled_like_dense_ones() -> None:
    weights = [
        torch.nn.Parameter(torch.zeros(12, 5)),
        torch.nn.Parameter(torch.zeros(3)),
        torch.nn.Parameter(torch.zeros(1)),
    ]
    weights[0].grad, weights[1].grad = draw_gradient([4, 2]), torch.randn(3)
    dense = torch.cat([weights[0].grad.to_dense().flatten(), weights[1].grad])
    values = gradient_values(weights)
    torch.testing.assert_close(torch.nn.utils.get_total_norm(values), dense.norm())
    for value in values:
        value.mul_(0.5)
    torch.testing.assert_close(torch.cat([weights[0].grad.to_dense().flatten(), weights[1].grad]), dense * 0.5)


def test_stable_adamw_equals_its_formula() -> None:
    """One number at a time, in double precision."""
    weights = [torch.randn(5, 3), torch.randn(4)]
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    first, second, eps, peak, decay = 0.9, 0.98, 1e-6, 0.1, 0.02
    groups = [{"params": parameters[:1], "weight_decay": decay}, {"params": parameters[1:], "weight_decay": 0.0}]
    optimizer = StableAdamWOptimizer(groups, lr=peak, betas=(first, second), eps=eps)
    expected = [weight.double() for weight in weights]
    means, squares = ([torch.zeros_like(weight) for weight in expected] for _ in range(2))
    for step in range(1, 6):
        rate = peak * (0.5 if step > 3 else 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for index, parameter in enumerate(parameters):
            size = 10.0 if step == 4 else 1.0  # a jump, so that clipping has an effect
            gradient = torch.randn(parameter.shape) * size
            parameter.grad = gradient
            gradient = gradient.double()
            means[index] = first * means[index] + (1 - first) * gradient
            squares[index] = second * squares[index] + (1 - second) * gradient**2
            unbiased = squares[index] / (1 - second**step)
            rms = math.sqrt(float((gradient**2 / unbiased.clamp(min=eps**2)).mean()))
            own = rate / max(1.0, rms)
            shrink = 1 - own / peak * (decay if index == 0 else 0.0)
            update = means[index] / (1 - first**step) / (unbiased.sqrt() + eps)
            expected[index] = expected[index] * shrink - own * update
            if step == 4:
                assert rms > 1.5
        optimizer.step()
        for parameter, value in zip(parameters, expected, strict=True):
            torch.testing.assert_close(parameter.data.double(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("iteration", ITERATIONS)
def test_orthogonalization_applies_its_polynomials_to_singular_values(iteration: Any) -> None:
    matrix = torch.randn(12, 7, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / (values.square().sum().sqrt() + 1e-7)
    for a, b, c in ITERATIONS[iteration]:
        values = a * values + b * values**3 + c * values**5
    expected = left @ values.diag() @ right
    torch.testing.assert_close(orthogonalize(matrix, iteration), expected)
    torch.testing.assert_close(orthogonalize(matrix.T, iteration), expected.T)


def test_muon_matches_torchs_muon() -> None:
    """torch's Muon computes in bf16, ours in fp32 on CPUs."""
    start = torch.randn(16, 24)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    options = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
    mine = MuonOptimizer([(ours, [16])], **options)
    peer = torch.optim.Muon([theirs], **options, nesterov=True, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        gradient = torch.randn(16, 24)
        ours.grad, theirs.grad = gradient, gradient.clone()
        mine.step()
        peer.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.05 * moved


def test_muon_orthogonalizes_stacked_matrices_separately() -> None:
    start, gradient = torch.randn(12, 6), torch.randn(12, 6)
    stacked = torch.nn.Parameter(start.clone())
    optimizer = MuonOptimizer([(stacked, [6, 4, 2])], lr=0.1, momentum=0.0, weight_decay=0.0)
    stacked.grad = gradient
    optimizer.step()
    for part, direction, after in zip(
        start.split([6, 4, 2]), gradient.split([6, 4, 2]), stacked.split([6, 4, 2]), strict=True
    ):
        size = ADAMW_UPDATE_SIZE * math.sqrt(max(direction.shape))
        torch.testing.assert_close(after.data, part - 0.1 * size * orthogonalize(direction))


@pytest.mark.parametrize("section", [AdamW(), StableAdamW(kind="stable_adamw"), Muon(kind="muon")])
def test_every_parameter_is_optimized_once_and_only_matrices_decay(section: Any) -> None:
    model = make_model(norm_bias=True, attention_qkv_bias=True)
    optimizers = section.build(model)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    taken = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(taken) == sorted(id(parameter) for parameter in model.parameters())
    decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        is_matrix = name.endswith("weight") and "norm" not in name
        assert decays[id(parameter)] == (section.weight_decay if is_matrix else 0.0), name


def test_muon_optimizes_the_matrices_of_layers_and_adamw_the_rest() -> None:
    model = make_model()
    muon, adamw = Muon(kind="muon").build(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    inside = {names[id(parameter)].split("layers.")[1].split(".", 1)[1] for parameter in muon.param_groups[0]["params"]}
    assert inside == {"attention.qkv.weight", "attention.out.weight", "mlp.up.weight", "mlp.down.weight"}
    assert len(muon.param_groups[0]["params"]) == 8
    assert isinstance(adamw, torch.optim.AdamW)
    parts = {tuple(muon.parts[id(parameter)]) for parameter in muon.param_groups[0]["params"]}  # type: ignore[attr-defined]
    assert parts == {(32, 32, 32), (32,), (48, 48)}


def test_every_polar_express_step_is_the_best_for_what_the_steps_before_it_leave() -> None:
    """The best polynomial errs equally far below and above 1 (Chebyshev), from the smallest singular value 1e-3 on."""
    low, high = 1e-3, 1.0
    for a, b, c in ITERATIONS["polar_express"]:
        x = torch.linspace(low, high, 100_001, dtype=torch.float64)
        values = a * x + b * x**3 + c * x**5
        low, high = values.min().item(), values.max().item()
        assert 1 - low == pytest.approx(high - 1, abs=1e-6)
    assert (low, high) == pytest.approx((0.876, 1.124), abs=1e-3)


def test_muon_uses_the_chosen_orthogonalization() -> None:
    torch.manual_seed(0)
    matrix = torch.nn.Parameter(torch.randn(6, 4))
    before, matrix.grad = matrix.detach().clone(), torch.randn(6, 4)
    MuonOptimizer([(matrix, [6])], 0.1, 0.0, 0.0, "polar_express").step()
    size = ADAMW_UPDATE_SIZE * math.sqrt(6)
    torch.testing.assert_close(matrix.data, before - 0.1 * size * orthogonalize(matrix.grad, "polar_express"))
