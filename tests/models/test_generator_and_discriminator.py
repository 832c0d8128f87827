"""Replaced token detection: generator and discriminator against their formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bertblocks import BertBlocksForMaskedLM, BertBlocksForReplacedTokenDetection
from bertblocks.models import GeneratorAndDiscriminator
from tests.helpers import tiny_config

IDS = torch.tensor([5, 3, 7, 8, 3, 9, 10, 3])
CU_SEQLENS = torch.tensor([0, 5, 8], dtype=torch.int32)
LABELS = torch.tensor([-100, 11, -100, -100, 12, -100, -100, 13])
MASKED = LABELS != -100


def make_pair(sharing: Any, **options: Any) -> GeneratorAndDiscriminator:
    torch.manual_seed(0)
    config = tiny_config(**options)
    pair = GeneratorAndDiscriminator(
        BertBlocksForMaskedLM(config), BertBlocksForReplacedTokenDetection(tiny_config(**options)), sharing
    )
    return pair.eval()


def run(pair: GeneratorAndDiscriminator, seed: int = 0) -> Any:
    return pair(IDS, CU_SEQLENS, LABELS, torch.Generator().manual_seed(seed))


def filled_ids(pair: GeneratorAndDiscriminator) -> torch.Tensor:
    """The ids that the discriminator gets, recorded at its entry."""
    seen = {}

    def note(module: Any, args: Any, options: Any) -> None:
        seen.update(options)

    handle = pair.discriminator.register_forward_pre_hook(note, with_kwargs=True)
    run(pair)
    handle.remove()
    return seen["input_ids"]


def test_both_losses_equal_those_of_the_two_models_alone() -> None:
    pair = make_pair("none")
    out, filled = run(pair), filled_ids(pair)
    original = torch.where(MASKED, LABELS, IDS)
    assert torch.equal(filled[~MASKED], original[~MASKED])
    assert torch.equal(out.replaced, filled != original)
    alone = pair.generator(IDS, cu_seqlens=CU_SEQLENS, labels=LABELS).loss * 3
    torch.testing.assert_close(out.generator_total, alone)
    logits = pair.discriminator(filled, cu_seqlens=CU_SEQLENS).logits
    target = (filled != original).float()
    expected = -(target * F.logsigmoid(logits) + (1 - target) * F.logsigmoid(-logits)).sum()
    torch.testing.assert_close(out.discriminator_total, expected)
    torch.testing.assert_close(out.logits, logits)


@pytest.mark.slow
def test_fillings_are_samples_of_the_generator() -> None:
    """A generator that knows two tokens, by 3 to 1; it finds the original in a quarter of the cases."""
    pair = make_pair("none")
    with torch.no_grad():
        pair.generator.decoder.weight.zero_()
        pair.generator.decoder.bias.fill_(-1e4)
        pair.generator.decoder.bias[20], pair.generator.decoder.bias[11] = torch.tensor([3.0, 1.0]).log()
        random = torch.Generator().manual_seed(1)
        replaced = torch.stack([pair(IDS, CU_SEQLENS, LABELS, random).replaced for _ in range(400)])
    assert replaced[:, [4, 7]].all()  # neither token is the original there
    assert not replaced[:, ~MASKED].any()
    assert replaced[:, 1].double().mean().item() == pytest.approx(0.75, abs=4.5 * (0.75 * 0.25 / 400) ** 0.5)


def test_tied_embeddings_are_one_table_that_both_losses_train() -> None:
    pair = make_pair("tied")
    table = pair.generator.model.embedding.token.weight
    assert pair.discriminator.model.embedding.token.weight is table
    run(pair).discriminator_total.backward()
    assert table.grad is not None
    assert table.grad.abs().sum() > 0


def test_gradient_disentangled_embeddings_keep_the_losses_apart() -> None:
    pair = make_pair("gradient_disentangled")
    ours, theirs = pair.discriminator.model.embedding.token.weight, pair.generator.model.embedding.token.weight
    assert ours.abs().sum() == 0
    out = run(pair)
    out.discriminator_total.backward(retain_graph=True)
    assert theirs.grad is None
    assert ours.grad is not None
    assert ours.grad.abs().sum() > 0
    ours.grad = None
    out.generator_total.backward()
    assert ours.grad is None
    assert theirs.grad is not None


def test_merged_embeddings_give_the_discriminator_alone_the_same_logits() -> None:
    pair = make_pair("gradient_disentangled")
    own = pair.discriminator.model.embedding.token.weight
    with torch.no_grad():
        own.add_(torch.randn_like(own))
        together = run(pair)
        own.copy_(pair.merged_embeddings())
        original = torch.where(MASKED, LABELS, IDS)
        # tokens that were not replaced, in a text without any, see the same context
        pair.sharing = "none"
        apart = run(pair)
    assert torch.equal(together.replaced, apart.replaced)
    assert len(original) == len(apart.logits)
    torch.testing.assert_close(together.logits, apart.logits)


def test_shared_tables_need_one_size() -> None:
    generator = BertBlocksForMaskedLM(tiny_config(embedding_size=16))
    with pytest.raises(ValueError, match=r"sharing is 'tied', but token embeddings have shape .*same embedding_size"):
        GeneratorAndDiscriminator(generator, BertBlocksForReplacedTokenDetection(tiny_config()), "tied")
