"""`bertblocks presets`: the built-in architectures."""

from __future__ import annotations

from bertblocks.cli.options import AsJson


def presets(as_json: AsJson = False) -> None:
    """List the built-in architectures.

    Parameters are those of masked-LM models.
    """
    from bertblocks.analysis import build, count_parameters
    from bertblocks.cli.output import make_console, make_table, print_json, print_table
    from bertblocks.config import BertBlocksConfig
    from bertblocks.config.presets import preset_names, read_preset

    rows = []
    for name in preset_names():
        config = BertBlocksConfig.from_preset(name)
        rows.append(
            {
                "name": name,
                "description": read_preset(name)["description"],
                "layers": config.num_hidden_layers,
                "hidden": config.hidden_size,
                "heads": config.num_attention_heads,
                "parameters": count_parameters(build(config, "masked-lm"))["total"],
            }
        )
    if as_json:
        print_json(rows)
        return
    table = make_table(["name", "description", "layers x hidden", "parameters"], text_columns=2)
    for row in rows:
        size = f"{row['layers']} x {row['hidden']:,}"
        table.add_row(row["name"], row["description"], size, f"{row['parameters']:,}")
    print_table(make_console(), "Architectures", table)
