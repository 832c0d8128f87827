"""Writes docs/families.md from the registry of checkpoint families and the text below.

Run `python docs/generate_families.py` after you add a family or a task to one.
"""

from __future__ import annotations

from pathlib import Path

from bertblocks.checkpoints.families import FAMILIES
from bertblocks.models import TASK_MODELS

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "families.md"

INTRODUCTION = """\
# Checkpoint families

<!-- Written by docs/generate_families.py. Change the text there, not this page. -->

A family is the set of checkpoints with one `model_type`. BertBlocks reads each family into the same models and writes
it back from them. *In, out* means that the family has a class for the task, and that BertBlocks reads and writes it.
If a family does not open in transformers, BertBlocks reads and writes its files and is the only library here that runs
them.
"""

TEXT = """\
`bertblocks families` prints this table, and `--json` prints it for programs.

Nothing is skipped silently. A config value that BertBlocks does not support raises an error that names it. So does a
tensor that is missing, unknown or of the wrong shape. [What is not kept](#what-is-not-kept) lists the exceptions.

## Load

```python
import tempfile
import bertblocks
from transformers import RobertaConfig, RobertaForMaskedLM

folder = tempfile.mkdtemp()
sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
RobertaForMaskedLM(RobertaConfig(**sizes)).save_pretrained(folder)

model, tokenizer = bertblocks.load(folder)  # a hub id works too
print(type(model).__name__, tokenizer)  # BertBlocksForMaskedLM None
print(model.config.position_offset)  # 2
```

| Function | From | To |
| --- | --- | --- |
| `bertblocks.load` | a folder or hub id, of any family or BertBlocks' own | model and tokenizer (or None) |
| `from_huggingface` | a folder, hub id or transformers model of any family | model |
| `to_huggingface` | a BertBlocks model | transformers model |
| `bertblocks.save_huggingface` | a BertBlocks model | a folder of any family; returns the family's name |
| `bertblocks.convert` | a folder or hub id | a folder with proven equal outputs |

`task` defaults to the task that the config names, and `dtype` to the precision of the weights. Many sentence encoders
name a masked-LM class but hold no such head: BertBlocks reads what is there, so such a checkpoint becomes a base model,
with a warning. If you ask for a task whose head the checkpoint lacks, the head is initialized and a warning names it.
Commands that do not train, and `Predictor`, raise an error instead. Without a family, `to_huggingface` and
`save_huggingface` choose the family that the model came from, if it can still hold the model, or else the first that
can. If none can, the error gives the reason for every family.

## Convert

```text
bertblocks convert SRC DST [--to FAMILY|native] [--task TASK] [--allow-pickle] [--tolerance X] [--json]
```

`--to` defaults to `bertblocks`. `--to native` writes the family that the model came from, or else the first that can
hold it. If no family can, it writes BertBlocks' own format and prints the reasons. If you name a family that cannot
hold the model, the command fails.

**Proof.** The command opens source and result from their files and runs both in fp32, each with the library that owns
the format: transformers if the family opens there, and BertBlocks otherwise. The probes are ragged batches of random
ids, padded on the right. Their lengths are 1, 2, 7, both sides of every window edge, and 512, or the largest length
that `max_position_embeddings` allows. The proof compares every output that both models return (hidden states, pooler
output, logits) on real tokens. An output may differ by at most `--tolerance` (3e-5) times its largest absolute value,
or times 1 if that value is smaller. Otherwise the command exits with code 1 and does not write DST. If only BertBlocks
runs both formats, the proof compares what BertBlocks reads from each.

**DST** must be new or empty. The command writes to a hidden folder next to it and renames that folder after the proof.
A full disk or an interruption leaves no DST.

**Copied files.** The command copies every file of SRC that is neither weights nor config nor code, such as tokenizer
files, modules of sentence-transformers with their weights, and the model card. It does not copy weights in other
formats at the top of SRC (`*.bin`, `*.h5`, `*.msgpack`). Nor does it copy `*.py`, `*.pkl`, `*.pt`, `*.pth`, `*.ckpt`,
`*.onnx`, hidden files (`.*`), training checkpoints and optimizer states, at any depth. It skips `*.bin`, unless
pickles are allowed, and links that lead out of SRC, and prints a note for each. From the hub it downloads JSON,
safetensors, `*.txt`, `*.model` and `*.md` files only.

**Pickles.** BertBlocks reads safetensors. With `--allow-pickle`, or `allow_pickle=True` in `convert` and
`from_huggingface`, it also reads `pytorch_model.bin` if there are no safetensors. It reads tensors only: a file that
holds anything else raises an error, and no code runs. Results are always safetensors.

**Checksums.** Weights that BertBlocks writes, also with `model.save_pretrained`, carry a SHA-256 in the metadata of the
safetensors file. Loading, also with `from_pretrained`, verifies it and rejects a damaged file. This takes about 0.1 s
of CPU time for 100 MB; `BERTBLOCKS_VERIFY=0` in the environment turns it off, for saving too. Files of other libraries
have no such checksum and load as they are.

**Shards.** BertBlocks reads sharded checkpoints by their index. It writes weights of more than 5 GB in shards;
`max_shard_bytes` in `convert` and `save_huggingface` sets another limit.

## NeoBERT

BertBlocks reads four layouts. One is the official layout on the hub: RoPE, RMSNorm, SwiGLU with one packed matrix, and
an untied decoder with a bias. The other three come from its fork: SwiGLU with two matrices, GELU, and nGPT, each with
learned positions and LayerNorm if its config says so. The fork's keys are `rope`, `rms_norm`, `hidden_act` and `ngpt`;
a config without them is official. BertBlocks writes the official layout if the official class can run the model, and
the fork's layout otherwise. An unknown key raises an error that suggests the nearest known one.

The tensors decide what the config leaves open: whether the decoder is tied, whether it has a bias, and, if there is no
`architectures`, the task. Two matrices that differ are not tied, whatever `tie_word_embeddings` says.

`read_yaml_config` reads the `model` section of the fork's training files and applies the defaults of its training.
`bertblocks describe` and `compare` accept such a file too.

```python
import tempfile
from pathlib import Path
from bertblocks.checkpoints.families.neobert import read_yaml_config

file = Path(tempfile.mkdtemp()) / "pretrain.yaml"
file.write_text("model:\\n  hidden_size: 64\\n  num_attention_heads: 4\\n  rope: false\\n  norm_eps: 1e-6\\n")
config = read_yaml_config(file)
print(config.num_hidden_layers, config.embd_pos_enc_kind, config.norm_eps)  # 12 learned 1e-06
```

## Published layouts

Some authors publish checkpoints with code of their own and the `model_type` of another family. BertBlocks recognizes
them by other keys of their config and runs none of their code.

| Family | Models | `model_type` | Recognized by |
| --- | --- | --- | --- |
| `new` | GTE v1.5 and multilingual, Stella | `new` | |
| `jina-bert-v2` | Jina embeddings v2 | `bert` | `position_embedding_type: "alibi"` |
| `mosaic-bert` | MosaicBERT, DNABERT-2 | `bert` | `alibi_starting_size` |
| `jina_embeddings_v3` | Jina embeddings v3 | `xlm-roberta` | `position_embedding_type: "rotary"` |
| `esmc` | ESM C | `esmc` | `d_model` |
| `esmc` | ESM++ | `ESMplusplus` | |

Jina v3 holds LoRA adapters for tasks. `from_huggingface(path, adapter="retrieval.query")` merges one into the weights;
without `adapter` you get the encoder that all of them change. It is written in transformers' layout.

The authors of ESM C publish a pickle without a config. To read it, call it `pytorch_model.bin`, write the arguments of
their class into a `config.json`, `{"model_type": "esmc", "d_model": 960, "n_heads": 15, "n_layers": 30}` for 300M, and
convert it with `--allow-pickle`. ESM++ holds the same tensors. Both are written in transformers' layout.

## DeBERTa

v2 and v3 share the `model_type` `deberta-v2`. v3 is a discriminator; `task="replaced-token-detection"` reads its head
(`mask_predictions`), for which transformers has no class. If a config does not say `legacy: false`, transformers starts
a new masked-LM head, even if the file has one in the newer layout (`lm_predictions`); BertBlocks reads it. Float labels
of a sequence classifier without a `problem_type` mean several labels here and a distribution over classes in
transformers.

## Splinter

`SplinterForQuestionAnswering` and `SplinterForPreTraining` have the same head, which is read for question answering
(`qa_head: "question_aware"`). It reads the question off the token `question_token_id`, which Splinter's tokenizer puts
behind the question. A text with several such tokens is answered for the first.

## Decoders

Llama, Mistral, Qwen3 and ModernBERT's decoder are causal, unless `is_causal` is false in the config or the class is one
of LLM2Vec's (`LlamaBiModel` and others). transformers' classes ignore `is_causal`, so a bidirectional model gives other
results there. The task masked-lm reads and writes their `ForCausalLM` classes: the logits of a token predict the next
one, and BertBlocks does not shift labels. CLIP's text tower opens from a folder that `CLIPTextModel` saved; its pooled
output is the last token (`pooling="last"`), and its projection is not read.

## ConvBERT

BertBlocks' `num_attention_heads` counts the heads of attention, half as many as `num_attention_heads` in the published
configs (`head_ratio`). In transformers, the convolutions of the last tokens of a text also read its padding, so that
results depend on the length of the batch. BertBlocks gives the result of the text alone. A model with grouped
feed-forward layers (`num_groups`, as in ConvBERT medium-small) raises an error.

## What is not kept

- DeBERTa in transformers has two layouts of the masked-LM head. BertBlocks reads both and writes the newer one, as the
  published checkpoints have it (`lm_predictions`), unless the decoder is not tied or the embeddings are narrower than
  the layers. A position table that a DeBERTa config does not use is dropped.
- A `ForPreTraining` checkpoint of ALBERT or Nomic BERT is read as a masked-LM model. Its sentence-order or
  next-sentence head and its pooler are dropped with a warning.
- A checkpoint for multiple choice is read as a sequence classifier with one label, which scores each option, and
  written as one. This needs a family in which both heads are alike: BERT, ERNIE, ALBERT, RemBERT, DistilBERT, Megatron
  BERT, ModernBERT and DeBERTa v2. In the others, give `task="base"` to read the encoder.
- If you read a checkpoint for another task, its own head is not read.
- BERT and ALBERT have two masked-LM biases. BertBlocks reads the one at `decoder.bias`, as transformers does, and
  writes both. If they differ, the other one is lost.
- Tensors that follow from the config are not kept: `position_ids`, RoPE's `inv_freq`, the unused position table of
  rotary ESM checkpoints, RoFormer's table of sines, and unused tensors of older nGPT files. ESM's frequencies are
  checked, and their precision is kept in `rope_frequency_dtype`.
- I-BERT is read before quantization only. The ranges of activations that it collects for quantization are dropped.
- ERNIE's later versions have embeddings of tasks. BertBlocks keeps all of them and uses the first, as transformers does
  if you pass no task.
- The encoder of a whole T5 is read and its decoder dropped with a warning. BertBlocks does not apply T5's dropout after
  the final norm.
- `initializer_range` and other settings for initialization are read if BertBlocks has them. They never prevent a
  conversion.
"""


def render() -> str:
    """The page."""
    tasks = [task for task in TASK_MODELS if any(task in family.model_classes for family in FAMILIES.values())]
    rows = [("Family", *tasks, "opens in transformers"), ("---",) * (len(tasks) + 2)]
    for name, family in FAMILIES.items():
        support = family.support()
        marks = ["in, out" if task in support["tasks"] else "-" for task in tasks]
        rows.append((f"`{name}`", *marks, "yes" if support["opens_in_transformers"] else "-"))
    table = "".join("| " + " | ".join(row) + " |\n" for row in rows)
    return f"{INTRODUCTION}\n{table}\n{TEXT}"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(f"Wrote {TARGET.relative_to(ROOT)}.")
