"""Optional packages, checked before a command starts its work."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

#: The name on PyPI and the extra of BertBlocks for each optional package.
EXTRAS = {
    "datasets": ("datasets", "training"),
    "datasketch": ("datasketch", "dedup"),
    "peft": ("peft", "peft"),
    "fsspec": ("fsspec", "bulk"),
    "pyarrow": ("pyarrow", "training"),
    "pyspark": ("pyspark", "spark"),
    "ray": ("ray[data]", "ray"),
    "scipy": ("scipy", "training"),
    "seqeval": ("seqeval", "training"),
    "sklearn": ("scikit-learn", "training"),
    "tensorboard": ("tensorboard", "training"),
    "usearch": ("usearch", "search"),
    "vl_convert": ("vl-convert-python", "training"),
    "trackio": ("trackio", "trackers"),
    "wandb": ("wandb", "trackers"),
    "httptools": ("httptools", "serve"),
    "orjson": ("orjson", "serve"),
    "prometheus_client": ("prometheus-client", "serve"),
    "starlette": ("starlette", "serve"),
    "uvicorn": ("uvicorn", "serve"),
    "uvloop": ("uvloop", "serve"),
    "opentelemetry.sdk": ("opentelemetry-sdk", "otel"),
    "opentelemetry.exporter.otlp.proto.http": ("opentelemetry-exporter-otlp-proto-http", "otel"),
}


class MissingPackageError(ValueError):
    """A package that the command needs is not installed."""


def require_packages(packages: Iterable[str], purpose: str) -> None:
    """Raises an error that names the missing packages and how to install them.

    Example:
        >>> require_packages(["json"], "this example")
    """
    missing = [name for name in packages if not _is_installed(name)]
    if missing:
        names = " and ".join(EXTRAS[name][0] for name in missing)
        extras = ",".join(dict.fromkeys(EXTRAS[name][1] for name in missing))
        raise MissingPackageError(
            f"{purpose} needs {names}, which is not installed; install it with: pip install 'bertblocks[{extras}]'"
        )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package that holds it
        return False
    except ValueError:  # the module is loaded, but does not have a spec
        return True
