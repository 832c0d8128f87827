"""`bertblocks serve`: models behind HTTP."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bertblocks.cli.model_options import ModelOptions
from bertblocks.cli.options import with_options
from bertblocks.cli.output import echo, make_console, make_table, print_table
from bertblocks.cli.source import fail

if TYPE_CHECKING:
    from bertblocks.serve.front import Service
    from bertblocks.serve.metrics import Metrics
    from bertblocks.serve.models import ModelSet

PACKAGES = ("starlette", "uvicorn", "uvloop", "httptools", "orjson", "prometheus_client")


@dataclass(frozen=True)
class NetworkOptions:
    """Where the server listens, and who may use it."""

    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 is every network.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="The port to listen on; 0 takes any free one.")] = 8000
    uds: Annotated[Path | None, typer.Option(help="A unix socket to listen on, in place of host and port.")] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that clients must send. May be repeated; BERTBLOCKS_API_KEY keeps it out of `ps`."),
    ] = None
    api_key_file: Annotated[Path | None, typer.Option(help="A file with a key per line.")] = None
    protect_metrics: Annotated[
        bool, typer.Option("--protect-metrics", help="Require a key for /metrics and /stats too.")
    ] = False
    cors: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="An origin whose pages may call the server, or *. May be repeated."),
    ] = None


@dataclass(frozen=True)
class LimitOptions:
    """What clients may ask for, and how long it may take."""

    queue_tokens: Annotated[int, typer.Option(help="Tokens that may wait; beyond them the answer is 429.")] = 200_000
    queue_seconds: Annotated[
        float, typer.Option(help="Seconds that they may take at the measured speed; beyond them the answer is 429.")
    ] = 5.0
    timeout: Annotated[float, typer.Option(help="Seconds until a request is given up.")] = 30.0
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="The largest body of a request.")] = "16MiB"
    max_inputs: Annotated[int, typer.Option(help="The most inputs of a request.")] = 1024
    max_text_tokens: Annotated[int | None, typer.Option(help="The most tokens of a text.")] = None
    max_connections: Annotated[int, typer.Option(help="The most clients at a time.")] = 4096
    client_timeout: Annotated[
        float, typer.Option(help="Seconds in which a client must send its request and take its answer.")
    ] = 30.0
    drain: Annotated[float, typer.Option(help="Seconds that accepted requests have to finish after SIGTERM.")] = 30.0


@with_options
def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL", help="Checkpoint folders of any family, or hub ids; NAME=PATH gives one another name."
        ),
    ],
    *,
    network: NetworkOptions,
    running: ModelOptions,
    workers: Annotated[
        int, typer.Option(help="Processes that run the models; with 0 they run in the server's own.")
    ] = 0,
    too_long: Annotated[
        Literal["error", "truncate", "window"] | None,
        typer.Option(help="How to handle texts beyond the model's length, unless a request says so."),
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a batch; by default what suits the machine.")
    ] = None,
    limits: LimitOptions,
    docs: Annotated[bool, typer.Option(help="Serve /docs and /openapi.json.")] = True,
    log_format: Annotated[
        Literal["text", "json", "off"], typer.Option(help="The log on stderr; off logs no requests.")
    ] = "text",
    otlp_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Send traces there; by default OTEL_EXPORTER_OTLP_ENDPOINT.")
    ] = None,
) -> None:
    """Serve models over HTTP, with the routes of OpenAI, TEI and Cohere, and of BertBlocks for every task.

    The page at / tries them, /docs describes the routes. SIGTERM or Ctrl-C ends the server when every accepted request
    is answered.
    """
    from bertblocks.core.requirements import require_packages

    try:
        require_packages(PACKAGES, "Serving")
        from bertblocks.serve.auth import gather_keys
        from bertblocks.serve.run import run_server
        from bertblocks.serve.settings import ServeSettings, parse_bytes

        settings = ServeSettings(
            host=network.host,
            port=network.port,
            uds=network.uds,
            api_keys=gather_keys(network.api_key or [], network.api_key_file),
            protect_metrics=network.protect_metrics,
            cors=tuple(network.cors or ()),
            batch_tokens=batch_tokens,
            workers=workers,
            docs=docs,
            log_format=log_format,
            otlp_endpoint=otlp_endpoint,
            **{**asdict(limits), "max_body": parse_bytes(limits.max_body)},
        )
        if settings.is_exposed:
            echo(
                f"bertblocks: note: {settings.host} can be reached from other machines without a key; see --api-key.",
                err=True,
            )

        def load() -> ModelSet:
            from bertblocks.serve.loading import load_models

            return load_models(models, settings, {**running.for_predictor(), "too_long": too_long})

        def start(loaded: ModelSet, metrics: Metrics) -> Service:
            from bertblocks.serve.loading import make_service

            return make_service(loaded, settings, metrics, running.threads)

        run_server(settings, load, start, _print_models)
    except (OSError, ValueError) as error:
        fail(error)


def _print_models(models: ModelSet, url: str) -> None:
    table = make_table(["model", "precision", "device", "length", "tasks"], text_columns=5)
    for model in models:
        predictor = model.predictor
        device = str(predictor.model.device)
        table.add_row(model.name, predictor.precision, device, str(predictor.max_length), ", ".join(model.tasks))
    console = make_console()
    print_table(console, f"Serving on {url}", table)
    console.file.flush()
