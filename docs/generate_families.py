"""Writes docs/families.md: the table from the registry of checkpoint families, and the text below.

Run it after adding a family or a task of one: `python docs/generate_families.py`.
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

A family is the checkpoints of one `model_type`. Each is read into the same BertBlocks models and written back from
them. *In, out* means that the family has a class for the task, which is read and written. A family that does not open
in transformers is read and written as files, and only BertBlocks runs it here.
"""

TEXT = """\
`bertblocks families` prints this table; `--json` gives it to programs.

Within a family, a config value that BertBlocks cannot hold, a tensor that is missing, has another shape or goes nowhere
is an error that names it. [What is not kept](#what-is-not-kept) lists the exceptions.

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
| `bertblocks.convert` | a folder or hub id | a folder, proved equal |

The task is that of the checkpoint unless `task` says otherwise. A head that the checkpoint does not have is made fresh,
with a warning that names it. Weights keep their precision unless `dtype` says otherwise. `to_huggingface` and
`save_huggingface` without a family take the one that the model came from if it still fits, or else the first that can
hold it; if none can, the error gives every family's reason.

## Convert

```text
bertblocks convert SRC DST [--to FAMILY|native] [--allow-pickle] [--tolerance X] [--json]
```

`--to` is `bertblocks` by default. `--to native` writes the family that the model came from or else the first that can
hold it, and BertBlocks' own format if none can; then the reasons are printed. A family that is asked for by name and
cannot hold the model is an error.

**The proof.** Source and result are opened from their files and run side by side in fp32, each by the library that owns
its format: transformers where the family opens there, BertBlocks otherwise. The probes are ragged batches of random
ids, padded on the right. Their lengths are 1, 2, 7, both sides of every window edge, and 512, or as many as learned
positions allow. Every output that both have is compared (hidden states, pooler output, logits), on real tokens only.
The largest difference may be `--tolerance` (3e-5) times the size of that output: its largest number, or 1 if that is
more. If one output differs by more, the command ends with exit code 1 and DST is not written. Between two formats that
only BertBlocks runs, the proof compares two readings by BertBlocks.

**DST** must not exist or be empty. Everything is written to a hidden folder beside it, which gets its name after the
proof. A full disk or an interrupted proof leaves no DST.

**Carried along:** every file of SRC that is neither its weights nor its config nor code, such as tokenizer files, the
modules of sentence-transformers with their weights, and the model card. Not carried: weights in other formats beside
the config (`*.bin`, `*.h5`, `*.msgpack`), and anywhere `*.py`, `*.pkl`, `*.pt`, `*.pth`, `*.ckpt`, `*.onnx`, names
that begin with `.git`, and, with a note, `*.bin` unless pickles are allowed. Of a hub id only JSON,
safetensors, `*.txt`, `*.model` and `*.md` files are downloaded, so only these are carried.

**Pickles.** Only safetensors are read. `--allow-pickle`, or `allow_pickle=True` of `convert` and `from_huggingface`,
reads `pytorch_model.bin` too where there are no safetensors. It takes tensors only; a file that holds anything else is
refused, and nothing in it is run. Results are always safetensors.

**Shards.** Sharded checkpoints are read by their index. Weights of more than 5 GB are written in shards;
`max_shard_bytes` of `convert` and `save_huggingface` sets another limit.

## NeoBERT

Four layouts are read: the official one on the hub (RoPE, RMSNorm, SwiGLU with one packed matrix, an untied decoder with
a bias), and three of its fork: SwiGLU with two matrices, GELU, and nGPT, each with learned positions and LayerNorm if
its config says so. The fork's keys are `rope`, `rms_norm`, `hidden_act` and `ngpt`; a config without them is official.
On writing, a model that the official class can run is written for it, any other in the fork's layout. Unknown keys are
refused with the nearest known one.

Where the config leaves something open, the tensors decide: whether the decoder is tied and has a bias, and, without
`architectures`, which task it is. Two matrices that differ are not tied, whatever `tie_word_embeddings` says.

`read_yaml_config` reads the `model` section of the fork's training files, with the defaults of its training.
`bertblocks describe` and `compare` take such a file too.

```python
import tempfile
from pathlib import Path
from bertblocks.checkpoints.families.neobert import read_yaml_config

file = Path(tempfile.mkdtemp()) / "pretrain.yaml"
file.write_text("model:\\n  hidden_size: 64\\n  num_attention_heads: 4\\n  rope: false\\n  norm_eps: 1e-6\\n")
config = read_yaml_config(file)
print(config.num_hidden_layers, config.embd_pos_enc_kind, config.norm_eps)  # 12 learned 1e-06
```

## What is not kept

- An ELECTRA discriminator is read as its encoder. Its head, which tells replaced tokens, has no model here and is
  dropped, with a warning.
- A `ForPreTraining` checkpoint of ALBERT or Nomic BERT is read as a masked-LM model. Its sentence-order or
  next-sentence head and its pooler are dropped, with a warning.
- A checkpoint that is read for another task than its own is read without its own head.
- Of BERT's and ALBERT's two masked-LM biases the one at `decoder.bias` is read, as transformers uses it. The other is
  dropped where it differs, and written as a copy.
- Tables that follow from the config are not kept: `position_ids`, RoPE's `inv_freq`, the unused position table of
  rotary ESM checkpoints, and what nothing computes with in older nGPT files. ESM's frequencies are checked, and their
  precision is kept (`rope_frequency_dtype`).
- `initializer_range` and other settings of a first initialisation are read where BertBlocks has them, and never hold up
  a conversion.
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
