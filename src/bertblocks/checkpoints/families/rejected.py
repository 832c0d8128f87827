"""Text encoders of transformers that BertBlocks cannot open: why, and the nearest family that it can."""

from __future__ import annotations

#: By `model_type`: the reason, as the end of a sentence that begins with the family, and the nearest family.
REJECTED: dict[str, tuple[str, str | None]] = {
    "bart": ("is an encoder and a decoder, and its masked-LM head is on the decoder", "roberta"),
    "big_bird": ("attends to random blocks of tokens", "modernbert"),
    "canine": ("reads characters and shortens the sequence between layers", "bert"),
    "clip": ("holds images and texts; save its text model with CLIPTextModel", "clip_text_model"),
    "embedding_gemma2": ("holds images, sounds and texts", "gemma3_text"),
    "embedding_gemma2_text": ("gates every layer with another projection of the embeddings", "gemma3_text"),
    "emu3": ("holds images and texts", None),
    "flaubert": ("adds embeddings of languages to tokens", "camembert"),
    "fnet": ("mixes tokens by Fourier transforms instead of attention", "bert"),
    "funnel": ("shortens the sequence between layers", "electra"),
    "gemma2": ("caps its scores", "gemma3_text"),
    "gemma3": ("holds images and texts; its text model can be opened", "gemma3_text"),
    "layoutlm": ("embeds the places of words on a page", "bert"),
    "llama4": ("has mixtures of experts", "llama"),
    "longformer": ("has other projections for global tokens", "modernbert"),
    "longt5": ("attends to summaries of blocks", "t5"),
    "luke": ("has queries of its own for entities", "roberta"),
    "mbart": ("is an encoder and a decoder, and its masked-LM head is on the decoder", "xlm-roberta"),
    "mllama": ("holds images and texts", "llama"),
    "mobilebert": ("stacks several feed-forward networks between bottlenecks in each layer", "distilbert"),
    "modernvbert": ("holds images and texts", "modernbert"),
    "molmo2_text": ("belongs to a model of images and texts", "qwen3"),
    "mra": ("approximates attention at several resolutions", "roberta"),
    "mvp": ("is an encoder and a decoder, and its masked-LM head is on the decoder", "roberta"),
    "neomme": ("has value embeddings", "modernbert"),
    "nystromformer": ("approximates attention by landmarks", "bert"),
    "perceiver": ("attends from latent vectors instead of tokens", None),
    "reformer": ("hashes tokens into buckets and reverses its layers", None),
    "roc_bert": ("embeds the shape and the sound of Chinese characters", "bert"),
    "squeezebert": ("has grouped convolutions in place of matrices", "bert"),
    "t5gemma": ("is an encoder and a decoder that cap their scores", "gemma3_text"),
    "tapas": ("embeds rows and columns of tables", "bert"),
    "tipsv2_text_model": (
        "has sinusoidal positions in another order",
        "clip_text_model",
    ),
    "ultravbert": ("holds images and texts", "ultrabert"),
    "xlm": ("adds embeddings of languages to tokens", "xlm-roberta"),
    "xlnet": ("predicts tokens in random order with a second stream of queries", "mpnet"),
    "xmod": ("has an adapter for each language in every layer", "xlm-roberta"),
    "yoso": ("samples attention by hashing", "bert"),
}


def why_not(name: str) -> str | None:
    """Why BertBlocks cannot open a family, and which one it can, or None if nothing is known about it."""
    if name not in REJECTED:
        return None
    reason, near = REJECTED[name]
    hint = "" if near is None else f" The nearest family that BertBlocks opens is {near}."
    return f"BertBlocks cannot open it, because {name} {reason}.{hint}"
