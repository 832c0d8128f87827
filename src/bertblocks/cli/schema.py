"""`bertblocks schema`: the JSON schema of recipes, for editors and other programs."""

from __future__ import annotations


def schema() -> None:
    """Print the JSON schema of recipes."""
    from bertblocks.cli.output import print_json
    from bertblocks.core.plugins import load_plugins
    from bertblocks.training.recipe import Recipe

    load_plugins()
    print_json(Recipe.model_json_schema())
