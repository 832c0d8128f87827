"""Trains tokenizers on a corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Literal

from bertblocks.text.vocabulary import CONTINUATION

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

Kind = Literal["wordpiece", "bpe"]

#: The special tokens in the order of their ids.
SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
#: How much text a tokenizer is trained on at most; more hardly changes its vocabulary.
SAMPLE_BYTES = 32 * 10**6
#: How many characters get an entry of their own in WordPiece. Rarer ones are unknown tokens.
MAX_ALPHABET = 1000
BYTES = 256
#: A private-use character that marks the start of a word. BERT's normalizer removes it from every text.
WORD_MARK = "\ue000"


def train_tokenizer(kind: Kind, vocab_size: int, documents: Iterable[str]) -> PreTrainedTokenizerFast:
    """Trains a tokenizer with the special tokens [PAD] [UNK] [CLS] [SEP] [MASK], for texts and pairs of texts.

    WordPiece normalizes text as BERT's uncased models do. BPE works on bytes, so it has no unknown tokens.

    Example:
        >>> tokenizer = train_tokenizer("wordpiece", 40, ["a small model", "a smaller model"] * 3)
        >>> tokenizer.tokenize("a small model")
        ['a', 'small', 'model']
    """
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    if kind not in ("wordpiece", "bpe"):
        raise ValueError(f"The kind of tokenizer is {kind!r}; it must be wordpiece or bpe.")
    least = len(SPECIAL_TOKENS) + (BYTES if kind == "bpe" else 8)
    if vocab_size < least:
        raise ValueError(f"vocab_size is {vocab_size}; a {kind} tokenizer needs at least {least}.")
    tokenizer = _wordpiece(vocab_size, documents) if kind == "wordpiece" else _bpe(vocab_size, documents)
    cls, sep = SPECIAL_TOKENS["cls_token"], SPECIAL_TOKENS["sep_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (cls, sep)],
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS)


def _wordpiece(vocab_size: int, documents: Iterable[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    normalizer = normalizers.BertNormalizer(lowercase=True)
    vocabulary = _word_pieces(vocab_size, [normalizer.normalize_str(text) for text in documents])
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS.values()))
    return tokenizer


def _word_pieces(vocab_size: int, texts: list[str]) -> dict[str, int]:
    """Trains BPE on words that begin with a mark: tokens with the mark start a word, others continue one.

    The WordPiece trainer of `tokenizers` breaks ties at random, so no two of its runs agree.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    visible = (character for character in counts if not character.isspace())
    common = sorted(visible, key=lambda character: (-counts[character], character))
    alphabet = sorted(common[: min(MAX_ALPHABET, vocab_size // 4)])
    pairs = Tokenizer(models.BPE())
    mark = pre_tokenizers.Metaspace(replacement=WORD_MARK, prepend_scheme="always", split=False)
    pairs.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), mark])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=[*alphabet, WORD_MARK],
        limit_alphabet=len(alphabet) + 1,
        show_progress=False,
    )
    pairs.train_from_iterator(texts, trainer)
    found = pairs.get_vocab()
    pieces = [
        token[1:] if token[0] == WORD_MARK else CONTINUATION + token
        for token in sorted(found, key=lambda token: found[token])
    ]
    singles = [*alphabet, *(CONTINUATION + character for character in alphabet)]
    tokens = dict.fromkeys([*SPECIAL_TOKENS.values(), *singles, *filter(None, pieces)])
    return {token: number for number, token in enumerate(islice(tokens, vocab_size))}


def _bpe(vocab_size: int, documents: Iterable[str]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # in BPE the space before a word belongs to it, and so it does to [MASK]
    specials = [AddedToken(token, special=True, lstrip=name == "mask_token") for name, token in SPECIAL_TOKENS.items()]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer
