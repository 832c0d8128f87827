"""`bertblocks generate`: text from a masked-diffusion model, shown as its masks are filled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertblocks.cli.options import AsJson

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

#: Stands for a token that is still masked.
OPEN = "░"


def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder or hub id of a model and its tokenizer.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.")] = "",
    infill: Annotated[
        str | None,
        typer.Option(help="A text whose masks to fill, instead of a prompt.", show_default=False),
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens to generate after the prompt.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Forward passes over which masks are filled.")] = 32,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the most probable token, 1 samples from the model's distribution.")
    ] = 1.0,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Sample from the k most probable tokens.", show_default=False)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(max=1.0, help="Sample from the most probable tokens that sum to p.", show_default=False),
    ] = None,
    order: Annotated[
        Literal["confidence", "ancestral"],
        typer.Option(help="Which masks to fill first: the most confident, or random ones."),
    ] = "confidence",
    block: Annotated[
        int | None, typer.Option(min=1, help="Generate blocks of this many tokens, left to right.", show_default=False)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Generate text, or fill masks, with a masked-diffusion model."""
    if prompt and infill is not None:
        raise typer.BadParameter("PROMPT and --infill cannot be combined.")
    import torch

    from bertblocks.cli.output import echo, print_json
    from bertblocks.cli.source import fail

    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    try:
        writer = Writer(model)
        ids = writer.read(infill) if infill is not None else writer.start(prompt, length)
        with _watch(writer, hidden=as_json) as on_step:
            filled = writer.model.infill(
                ids[None],
                steps=steps,
                order=order,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                block_length=block,
                generator=generator,
                on_step=on_step,
            )[0]
    except (OSError, ValueError) as error:
        fail(error)
    if as_json:
        written = (ids == writer.tokenizer.mask_token_id).nonzero().flatten().tolist()
        print_json({"text": writer.text(filled), "ids": filled.tolist(), "written": written})
    else:
        echo(writer.text(filled))


class Writer:
    """A masked-diffusion model with its tokenizer."""

    def __init__(self, name_or_path: str) -> None:
        import transformers

        from bertblocks.checkpoints.load import load

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.model: Any
        self.tokenizer: Any
        self.model, self.tokenizer = load(name_or_path, task="masked-diffusion")
        if self.tokenizer is None:
            raise ValueError(f"{name_or_path} does not have a tokenizer; generate needs one.")

    def start(self, prompt: str, length: int) -> Tensor:
        """Returns the prompt followed by `length` masks, with the special tokens around them."""
        import torch

        tokenizer = self.tokenizer
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] + [tokenizer.mask_token_id] * length
        return torch.tensor([tokenizer.cls_token_id, *ids, tokenizer.sep_token_id])

    def read(self, text: str) -> Tensor:
        """Tokenizes a text with masks."""
        import torch

        ids = torch.tensor(self.tokenizer(text)["input_ids"])
        if not (ids == self.tokenizer.mask_token_id).any():
            raise ValueError(
                f"--infill is {text!r}; it must contain {self.tokenizer.mask_token} where text is missing."
            )
        return ids

    def text(self, ids: Tensor) -> str:
        """Decodes tokens, with a placeholder for each mask."""
        mask = self.tokenizer.mask_token_id
        runs: list[str] = []
        closed: list[int] = []
        for token in [*ids.tolist(), mask]:
            if token != mask:
                closed.append(token)
                continue
            runs += [self.tokenizer.decode(closed, skip_special_tokens=True), OPEN]
            closed = []
        return " ".join(run.strip() for run in runs[:-1] if run.strip())


@contextmanager
def _watch(writer: Writer, hidden: bool) -> Iterator[Callable[[Tensor], None]]:
    """Shows each step on a terminal and nothing in a pipe."""
    from bertblocks.cli.output import make_console

    console = make_console()
    if hidden or not console.is_terminal:
        yield lambda ids: None
        return
    from rich.live import Live
    from rich.text import Text

    from bertblocks.core.console import printable

    # transient: the command prints the finished text itself
    with Live(console=console, transient=True, auto_refresh=False) as live:
        yield lambda ids: live.update(Text(printable(writer.text(ids[0]))), refresh=True)
