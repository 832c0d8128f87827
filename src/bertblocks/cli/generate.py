"""`bertblocks generate`: text from a masked-diffusion model, shown as it comes out from under its masks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertblocks.cli.options import AsJson

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

#: What a token looks like that is not written yet.
OPEN = "░"


def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder or hub id of a model and its tokenizer.")],
    prompt: Annotated[str, typer.Argument(metavar="[PROMPT]", help="The text to go on from.")] = "",
    infill: Annotated[
        str | None,
        typer.Option(help="A text whose masks are filled in, in place of a prompt.", show_default=False),
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens to write after the prompt.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Forward passes, over which the tokens are revealed.")] = 32,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token, 1 draws as learned.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from the k likeliest.", show_default=False)] = None,
    top_p: Annotated[
        float | None, typer.Option(max=1.0, help="Draw from the likeliest that reach p together.", show_default=False)
    ] = None,
    order: Annotated[
        Literal["confidence", "ancestral"], typer.Option(help="Which come first: the surest, or random ones.")
    ] = "confidence",
    block: Annotated[
        int | None, typer.Option(min=1, help="Write blocks of so many tokens, left to right.", show_default=False)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed writes the same text.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Write text, or fill in masks, with a masked-diffusion model."""
    if prompt and infill is not None:
        raise typer.BadParameter("PROMPT and --infill exclude each other.")
    import torch

    from bertblocks.cli.output import print_json
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
        typer.echo(writer.text(filled))


class Writer:
    """A model that fills in masks, with the tokenizer that goes with it."""

    def __init__(self, name_or_path: str) -> None:
        import transformers

        from bertblocks.checkpoints.load import load

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.model: Any
        self.tokenizer: Any
        self.model, self.tokenizer = load(name_or_path, task="masked-diffusion")
        if self.tokenizer is None:
            raise ValueError(f"{name_or_path} has no tokenizer; text needs one.")

    def start(self, prompt: str, length: int) -> Tensor:
        """The prompt with `length` masks behind it, between the tokens that texts begin and end with."""
        import torch

        tokenizer = self.tokenizer
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] + [tokenizer.mask_token_id] * length
        return torch.tensor([tokenizer.cls_token_id, *ids, tokenizer.sep_token_id])

    def read(self, text: str) -> Tensor:
        """A text with masks."""
        import torch

        ids = torch.tensor(self.tokenizer(text)["input_ids"])
        if not (ids == self.tokenizer.mask_token_id).any():
            raise ValueError(f"--infill is {text!r}; it must hold {self.tokenizer.mask_token} where text is missing.")
        return ids

    def text(self, ids: Tensor) -> str:
        """Words, with a sign for each token that is still open."""
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
    """Shows each step in place on a terminal, and nothing in a pipe."""
    from bertblocks.cli.output import make_console

    console = make_console()
    if hidden or not console.is_terminal:
        yield lambda ids: None
        return
    from rich.live import Live
    from rich.text import Text

    # it goes away at the end, when the text is printed for good
    with Live(console=console, transient=True, auto_refresh=False) as live:
        yield lambda ids: live.update(Text(writer.text(ids[0])), refresh=True)
