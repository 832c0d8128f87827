"""Build an encoder from one config, change one choice, and compare the two."""

import torch

from bertblocks import BertBlocksConfig, BertBlocksModel, ConfigError

small = {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256, "num_attention_heads": 4}
bert = BertBlocksConfig.from_preset("bert-base", **small)
modern = BertBlocksConfig.from_preset("modernbert-base", **small)

for name, config in {"bert-base": bert, "modernbert-base": modern}.items():
    torch.manual_seed(0)
    model = BertBlocksModel(config).eval()
    ids = torch.tensor([[101, 7592, 2088, 102]])
    output = model(ids).last_hidden_state  # [batch, tokens, hidden]
    print(f"{name}: {model.num_parameters():,} parameters, output {tuple(output.shape)}")

try:
    BertBlocksConfig.from_preset("bert-base", num_kv_heads=5)
except ConfigError as error:
    print(f"An impossible choice: {error}")
