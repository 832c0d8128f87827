"""Runs every test that needs a GPU and prints a table to paste into an issue; started by `make gpu-check`."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

import pytest
import torch

PACKAGES = ("torch", "triton", "flash-attn", "flash-attn-3", "flash-attn-4", "liger-kernel", "transformers")


class Outcomes:
    """Collects the outcome of every test."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, float, str]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
            name = report.nodeid.removeprefix("tests/")
            text = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr or "")
            last = text.strip().splitlines()[-1] if text.strip() else ""
            self.rows.append((name, report.outcome, report.duration, last.replace("|", "/")[:160]))


def describe_machine() -> list[str]:
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    devices = [
        f"{torch.cuda.get_device_name(index)}, compute capability {torch.cuda.get_device_capability(index)}"
        for index in range(torch.cuda.device_count())
    ]
    return [f"GPUs: {'; '.join(devices) or 'none'}", f"CUDA: {torch.version.cuda}", ", ".join(versions)]


def main(arguments: list[str]) -> int:
    outcomes = Outcomes()
    code = pytest.main(["-m", "gpu", "-q", "-p", "no:randomly", *arguments], plugins=[outcomes])
    print("\n" + "\n".join(describe_machine()) + "\n")
    print("| test | outcome | seconds | reason |\n| --- | --- | --- | --- |")
    for name, outcome, seconds, reason in outcomes.rows:
        print(f"| `{name}` | {outcome} | {seconds:.2f} | {reason} |")
    if not torch.cuda.is_available():
        print("\ntorch finds no CUDA device, so nothing was checked.")
        return 1
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
