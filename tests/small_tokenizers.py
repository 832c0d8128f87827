"""Small tokenizers of each kind, trained on a few words."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CORPUS = ["plain words are here", "two leading trailing don't U.S.", "北京 東京タワー", "שלום العربية", "xxxxxxxx été"]

#: What WordPieceTrainer found in the corpus once. Its choice among merges that are equally good varies.
WORD_PIECES = """
' . a d e g h i l n o p r s t u w x ו ל ם ש ا ب ة ر ع ل ي タ ワ ー 京 北 東 ##r ##e ##l ##a ##i ##n ##ワ ##ー ##ل ##ع
##ر ##ب ##ي ##ة ##o ##d ##g ##s ##t ##w ##ל ##ו ##ם ##x ##xx ##in ##re ##xxxx ##ing are do et he le pl tr tw wo
xxxxx של ال タワ ##rd ##ling ##ai ##ad ##ain ##عر ##بي ##ום ##xxx don ete here lead plain trai two word xxxxxxxx
שלום العر タワー ##بية leading trailing words العربية
"""  # noqa: RUF001


def word_piece() -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *WORD_PIECES.split()])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    pair = "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, ends)
    return tokenizer


def byte_level(add_prefix_space: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if add_prefix_space:
        tokenizer.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    else:  # as ModernBERT: offsets with the leading space
        tokenizer.post_processor = processors.TemplateProcessing(
            "<s> $A </s>", "<s> $A </s> $B </s>", [("<s>", 0), ("</s>", 1)]
        )
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=80, special_tokens=["<unk>", "<mask>"], unk_token="<unk>")
    )
    return tokenizer


TOKENIZERS = {
    "wordpiece": word_piece(),
    "bpe": byte_level(),
    "bpe with prefix space": byte_level(add_prefix_space=True),
    "unigram": unigram(),
}


def wrap(name: str) -> PreTrainedTokenizerFast:
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if name == "wordpiece" else [])]
    special = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(TOKENIZERS[name].to_str()),
        model_input_names=inputs,
        **(special if name == "wordpiece" else {"mask_token": "<mask>"}),
    )
