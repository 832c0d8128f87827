"""MaxSim over ragged token sets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bertblocks.nn.ops import maxsim as module
from bertblocks.nn.ops.maxsim import maxsim

QUERIES, DOCUMENTS = [3, 1, 5], [4, 7, 1, 2]


def padded_maxsim(queries: Tensor, query_lengths: list[int], documents: Tensor, lengths: list[int]) -> Tensor:
    """The textbook formula on padded tensors."""
    a, b = (
        pad_sequence(tokens.split(sizes), batch_first=True)
        for tokens, sizes in ((queries, query_lengths), (documents, lengths))
    )
    is_real = torch.arange(b.shape[1]) < torch.tensor(lengths)[:, None]
    best = torch.einsum("qih,djh->qdij", a, b).masked_fill(~is_real[None, :, None], float("-inf")).amax(-1)
    return (best * (torch.arange(a.shape[1]) < torch.tensor(query_lengths)[:, None])[:, None]).sum(-1)


def tokens(dtype: torch.dtype = torch.float64, requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    queries, documents = (torch.randn(sum(sizes), 6, dtype=dtype) for sizes in (QUERIES, DOCUMENTS))
    return queries.requires_grad_(requires_grad), documents.requires_grad_(requires_grad)


@pytest.mark.parametrize("dots", [2**22, 50, 1])
def test_equals_the_formula_in_any_number_of_blocks(monkeypatch: pytest.MonkeyPatch, dots: int) -> None:
    monkeypatch.setattr(module, "DOTS_AT_ONCE", dots)
    queries, documents = tokens()
    expected = padded_maxsim(queries, QUERIES, documents, DOCUMENTS)
    torch.testing.assert_close(maxsim(queries, QUERIES, documents, DOCUMENTS), expected, atol=1e-12, rtol=0)


def test_gradients_equal_those_of_the_padded_formula() -> None:
    queries, documents = tokens(requires_grad=True)
    weights = torch.randn(3, 4, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((score(queries, QUERIES, documents, DOCUMENTS) * weights).sum(), (queries, documents))
        for score in (maxsim, padded_maxsim)
    ]
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dots", [2**22, 1])
def test_gradients_on_devices_equal_those_of_autograd(monkeypatch: pytest.MonkeyPatch, dots: int) -> None:
    monkeypatch.setattr(module, "DOTS_AT_ONCE", dots)
    queries, documents = tokens(requires_grad=True)
    chosen, gradient = torch.randint(14, (4, 9)), torch.randn(4, 9, dtype=torch.float64)
    products = torch.einsum("qh,dqh->dq", queries, documents[chosen])
    expected = torch.autograd.grad((products * gradient).sum(), (queries, documents))
    found = module._add_chosen(queries.detach(), documents.detach(), chosen, gradient)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


def test_a_frozen_side_gets_no_gradient() -> None:
    queries, documents = tokens(requires_grad=True)
    maxsim(queries, QUERIES, documents.detach(), DOCUMENTS).sum().backward()
    expected = torch.autograd.grad(padded_maxsim(queries, QUERIES, documents, DOCUMENTS).sum(), queries)[0]
    torch.testing.assert_close(queries.grad, expected, atol=1e-12, rtol=0)
    assert documents.grad is None


def test_half_precision_sums_in_float32() -> None:
    queries, documents = (side.bfloat16() for side in tokens())
    expected = padded_maxsim(queries, QUERIES, documents, DOCUMENTS).float()
    scores = maxsim(queries, QUERIES, documents, DOCUMENTS)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected, atol=0.2, rtol=0)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_texts_without_tokens(requires_grad: bool) -> None:
    """A document without tokens ranks last; a query without tokens scores 0; no texts give no scores."""
    queries, documents = tokens(requires_grad=requires_grad)
    scores = maxsim(queries, [3, 0, 6], documents, [11, 0, 3]).detach()
    expected = padded_maxsim(queries, [3, 6], documents, [11, 3]).detach()
    torch.testing.assert_close(scores[[0, 2]][:, [0, 2]], expected, atol=1e-12, rtol=0)
    assert scores[0, 1] == scores[2, 1] == module.NO_TOKENS
    assert scores[1, [0, 2]].tolist() == [0.0, 0.0]
    assert maxsim(queries[:0], [], documents, DOCUMENTS).shape == (0, 4)
    assert maxsim(queries, QUERIES, documents[:0], []).shape == (3, 0)
    if requires_grad:
        maxsim(queries, [3, 0, 6], documents, [11, 0, 3])[:, [0, 2]].sum().backward()
        assert torch.isfinite(documents.grad).all()


def test_lengths_must_add_up() -> None:
    queries, documents = tokens()
    with pytest.raises(ValueError, match=r"documents has shape \[14, 6\]; .* lengths add up to, 13"):
        maxsim(queries, QUERIES, documents, [13])
    with pytest.raises(ValueError, match="Query tokens have 5 dimensions and document tokens 6"):
        maxsim(queries[:, :5], QUERIES, documents, DOCUMENTS)
