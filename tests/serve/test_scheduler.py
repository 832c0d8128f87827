"""Requests through the scheduler, with real tiny models and real threads or processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertblocks import Predictor
from bertblocks.nn.ops.kernels import Kernel, describe, find_kernel
from bertblocks.nn.quantized import QuantizedBlock
from bertblocks.serve.batch_queue import BatchQueue
from bertblocks.serve.errors import (
    DeadlineExceeded,
    ModelNotFound,
    Overloaded,
    ShuttingDown,
    TaskNotServed,
    TooLarge,
    WorkerLost,
)
from bertblocks.serve.lanes import Batch
from bertblocks.serve.models import METHODS, ModelSet, ServedModel
from bertblocks.serve.observer import Observer
from bertblocks.serve.runner import Forward, LocalRunner, make_threads
from bertblocks.serve.scheduler import Scheduler, warm_up
from tests.serve.models import TEXTS, make_models, make_predictor


@pytest.fixture(scope="module")
def models() -> ModelSet:
    return make_models()


def in_thread(models: ModelSet) -> Callable[[BatchQueue], Sequence[threading.Thread]]:
    return lambda queue: make_threads(models, queue, threads=1)


def serve(models: ModelSet, work: Callable[[Scheduler], Awaitable[Any]], **options: Any) -> Any:
    """Runs a function with a scheduler that has started, and drains it."""

    async def main() -> Any:
        scheduler = Scheduler(models, in_thread(models), **options)
        await scheduler.start()
        try:
            return await asyncio.wait_for(work(scheduler), 60)
        finally:
            await scheduler.drain(10)

    return asyncio.run(main())


class Gate(threading.Thread):
    """A runner that holds the batch it has taken until it is opened."""

    def __init__(self, models: ModelSet, queue: BatchQueue) -> None:
        super().__init__(daemon=True)
        self.opened = threading.Event()
        self.batches: list[Batch] = []
        self._queue, self._runner = queue, LocalRunner(models, queue, threads=1)

    def run(self) -> None:
        while (batch := self._queue.take()) is not None:
            self.opened.wait()
            self.batches.append(batch)
            self._runner.run(batch)


async def with_gate(models: ModelSet, work: Callable[[Scheduler, Gate], Awaitable[Any]], **options: Any) -> Any:
    """Runs a function with a scheduler whose model has not begun to run."""
    gates: list[Gate] = []

    def runners(queue: BatchQueue) -> Sequence[threading.Thread]:
        gates.append(Gate(models, queue))
        return gates

    scheduler = Scheduler(models, runners, **options)
    starting = asyncio.create_task(scheduler.start())
    await asyncio.sleep(0)
    gates[0].opened.set()
    await starting
    gates[0].opened.clear()
    gates[0].batches.clear()
    try:
        return await asyncio.wait_for(work(scheduler, gates[0]), 60)
    finally:
        gates[0].opened.set()
        await scheduler.drain(10)


# ---------------------------------------------------------------------- models


def test_models_are_found_by_name_and_task(models: ModelSet) -> None:
    assert {model.name: model.tasks for model in models} == {
        "embedder": ("embed",),
        "filler": ("embed", "sparse", "fill-mask"),
        "reranker": ("embed", "rerank", "classify"),
        "classifier": ("embed", "classify"),
        "tagger": ("embed", "tag"),
        "reader": ("embed", "answer"),
    }
    assert models.find(None, "rerank").name == "reranker"
    assert models.find("filler", "embed").name == "filler"
    with pytest.raises(ModelNotFound, match=r"no model 'tager'; the models are embedder.*did you mean 'tagger'"):
        models.find("tager", "tag")
    with pytest.raises(TaskNotServed, match=r"embedder cannot do tag, only embed. tagger can"):
        models.find("embedder", "tag")
    with pytest.raises(TaskNotServed, match="No model here can do multi"):
        models.find(None, "multi")
    with pytest.raises(ValueError, match="Two models have the name 'a'; write NAME=PATH"):
        ModelSet([ServedModel("a", models[0].predictor), ServedModel("a", models[1].predictor)])


# ---------------------------------------------------------------------- results


def test_every_task_gives_what_the_predictor_gives_alone(models: ModelSet) -> None:
    """All tasks of all models at once, each compared with a call of its own."""
    calls = [(model, task) for model in models for task in model.tasks]

    async def work(scheduler: Scheduler) -> list[Any]:
        return await asyncio.gather(
            *(scheduler.run(model, METHODS[task], [warm_up(task, model)] * 3) for model, task in calls)
        )

    for (model, task), outcome in zip(calls, serve(models, work), strict=True):
        (expected,) = model.predictor.stream(METHODS[task], [warm_up(task, model)])
        assert len(outcome.results) == 3
        for result in outcome.results:
            if isinstance(expected, np.ndarray):
                np.testing.assert_allclose(result, expected, atol=1e-5)
            elif task == "sparse":
                np.testing.assert_allclose(result.values, expected.values, atol=1e-5)
            else:
                assert str(result)[:20] == str(expected)[:20]


def test_results_do_not_depend_on_other_requests(models: ModelSet) -> None:
    """The same text alone, among others, and next to a text whose vectors are NaN."""
    model = models[0]
    poisoned = make_predictor()
    token = poisoned.tokenizer("dog", add_special_tokens=False)["input_ids"][0]
    with torch.no_grad():
        poisoned.model.get_input_embeddings().weight[token] = torch.nan

    async def work(scheduler: Scheduler) -> list[np.ndarray]:
        alone = (await scheduler.run(model, "encode", [TEXTS[0]])).results[0]
        calls = [scheduler.run(model, "encode", [text]) for text in [*TEXTS, *TEXTS] * 3]
        crowd = (await asyncio.gather(*calls))[0].results[0]
        together = (await scheduler.run(model, "encode", [TEXTS[0], *TEXTS[1:]] * 4)).results[0]
        return [alone, crowd, together]

    alone, crowd, together = serve(models, work)
    np.testing.assert_allclose(crowd, alone, atol=1e-6)
    np.testing.assert_allclose(together, alone, atol=1e-6)

    own = ModelSet([ServedModel("poisoned", poisoned)])

    async def with_nan(scheduler: Scheduler) -> Any:
        return await asyncio.gather(*(scheduler.run(own[0], "encode", [text]) for text in ("a dog", TEXTS[0])))

    sick, healthy = serve(own, with_nan)
    assert np.isnan(sick.results[0]).all()
    np.testing.assert_allclose(healthy.results[0], alone, atol=1e-6)


@pytest.mark.parametrize("numbers", ["bfloat16", "int8"])
def test_other_requests_change_low_precision_by_rounding_only(numbers: str, tmp_path: Path) -> None:
    """Kernels round by the shape of a batch. Texts that differ are much further apart than that."""
    plain = make_predictor(hidden_size=64, num_hidden_layers=2)
    plain.model.save_pretrained(tmp_path)
    plain.tokenizer.save_pretrained(tmp_path)
    options: dict[str, Any] = {"int8": True} if numbers == "int8" else {"dtype": torch.bfloat16}
    own = ModelSet([ServedModel("model", Predictor(tmp_path, threads=1, **options))])

    async def work(scheduler: Scheduler) -> Any:
        alone = [(await scheduler.run(own[0], "encode", [text])).results[0] for text in TEXTS]
        together = (await scheduler.run(own[0], "encode", TEXTS * 5)).results
        return np.array(alone), np.array(together).reshape(5, len(TEXTS), -1)

    alone, together = serve(own, work)
    assert own[0].predictor.precision == numbers
    assert (together * alone).sum(-1).min() > 1 - 1e-3
    others = alone @ alone.T - 2 * np.eye(len(TEXTS))
    assert others.max() < 1 - 1e-2


def test_requests_of_several_clients_share_a_batch_whatever_their_options(models: ModelSet) -> None:
    async def work(scheduler: Scheduler, gate: Gate) -> Any:
        held = asyncio.create_task(scheduler.run(models[0], "encode", ["a dog"]))
        await asyncio.sleep(0.05)
        options = [{}, {"dimensions": 8}, {"normalize": False}]
        calls = [asyncio.create_task(scheduler.run(models[0], "encode", ["a dog"], own)) for own in options]
        await asyncio.sleep(0.05)
        gate.opened.set()
        await held
        return [len(outcome.results[0]) for outcome in await asyncio.gather(*calls)], gate.batches

    sizes, batches = asyncio.run(with_gate(models, work))
    assert sizes == [32, 8, 32]
    assert [len(batch.jobs) for batch in batches] == [1, 3]


def test_a_list_of_token_ids_is_embedded_like_its_text(models: ModelSet) -> None:
    ids = models[0].predictor.tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
    outcome = serve(models, lambda scheduler: scheduler.run(models[0], "encode", [TEXTS[0], ids]))
    np.testing.assert_allclose(outcome.results[0], outcome.results[1], atol=1e-6)
    assert outcome.tokens == 2 * (len(ids) + 2)
    vocab_size = models[0].predictor.model.config.vocab_size
    with pytest.raises(ValueError, match=f"Text 0 has the token id {vocab_size}; ids are between 0 and"):
        serve(models, lambda scheduler: scheduler.run(models[0], "encode", [[vocab_size]]))


@pytest.mark.parametrize("int8", [False, True])
def test_short_requests_run_in_the_middle_of_a_long_forward_pass(int8: bool) -> None:
    """A hook of the test adds a short request when the long one reaches its second layer."""
    predictor = make_predictor(int8=int8)
    own = ModelSet([ServedModel("model", predictor)])
    finished: list[str] = []

    async def work(scheduler: Scheduler) -> Any:
        loop = asyncio.get_running_loop()
        calls: list[Any] = []

        async def run(name: str, texts: list[str]) -> Any:
            outcome = await scheduler.run(own[0], "encode", texts)
            finished.append(name)
            return outcome

        def on_layer(*_: Any) -> None:
            handle.remove()
            calls.append(asyncio.run_coroutine_threadsafe(run("short", ["a dog"]), loop))
            while not scheduler._queue.has_short:
                time.sleep(0.001)

        handle = predictor.model.base_model.encoder.layers[1].register_forward_pre_hook(on_layer)
        long = await run("long", [TEXTS[3]] * 40)
        return long, await asyncio.wrap_future(calls[0])

    long, short = serve(own, work)
    assert finished == ["short", "long"]
    expected = make_predictor(int8=int8).encode([TEXTS[3], "a dog"])
    np.testing.assert_allclose(long.results[0], expected[0], atol=1e-6)
    np.testing.assert_allclose(short.results[0], expected[1], atol=1e-6)


def test_int8_layers_stay_one_call_in_a_server() -> None:
    """Hooks inside a layer would keep it from running in the C kernel."""
    kernel = find_kernel()
    if not isinstance(kernel, Kernel):
        pytest.skip(describe())
    predictor = make_predictor(int8=True)
    assert isinstance(predictor.model.base_model.encoder.layers[0], QuantizedBlock)
    Forward(ModelSet([ServedModel("model", predictor)]), 1, lambda: None)
    assert all(layer._pack(kernel) is not None for layer in predictor.model.base_model.encoder.layers)


# ---------------------------------------------------------------------- limits


def test_a_full_queue_and_requests_that_can_never_fit_are_rejected(models: ModelSet) -> None:
    async def work(scheduler: Scheduler, gate: Gate) -> Any:
        held = [asyncio.create_task(scheduler.run(models[0], "encode", [TEXTS[0]])) for _ in range(40)]
        await asyncio.sleep(0.05)
        with pytest.raises(Overloaded, match=r"The queue is full with \d+ tokens") as caught:
            await scheduler.run(models[0], "encode", [TEXTS[0]] * 10)
        assert caught.value.retry_after > 0
        with pytest.raises(TooLarge, match="takes at most 300 at once"):
            await scheduler.run(models[0], "encode", [TEXTS[0]] * 100)
        gate.opened.set()
        answered = await asyncio.gather(*held, return_exceptions=True)
        assert any(isinstance(outcome, Overloaded) for outcome in answered)
        assert any(hasattr(outcome, "results") for outcome in answered)
        await scheduler.run(models[0], "encode", [TEXTS[0]])  # there is room again
        assert scheduler.tokens == 0

    asyncio.run(with_gate(models, work, queue_tokens=300))


def test_the_queue_is_bounded_by_the_seconds_that_it_takes(models: ModelSet) -> None:
    async def work(scheduler: Scheduler, gate: Gate) -> Any:
        scheduler._queue.speed = 10.0  # tokens per second
        held = [asyncio.create_task(scheduler.run(models[0], "encode", ["a dog"] * 10))]  # 50 tokens: 5 seconds
        await asyncio.sleep(0.05)
        held.append(asyncio.create_task(scheduler.run(models[0], "encode", ["a dog"] * 3)))
        await asyncio.sleep(0.05)
        with pytest.raises(Overloaded, match="The queue is full with 65 tokens") as caught:
            await scheduler.run(models[0], "encode", ["a dog"])
        assert caught.value.retry_after == pytest.approx(65 / 10 - 6)
        with pytest.raises(Overloaded) as caught:  # it would not be done before its deadline
            await scheduler.run(models[0], "encode", ["a dog"], timeout=2)
        assert caught.value.retry_after == pytest.approx(65 / 10 - 2)
        gate.opened.set()
        assert [len(outcome.results) for outcome in await asyncio.gather(*held)] == [10, 3]

    asyncio.run(with_gate(models, work, queue_seconds=6.0))


def test_deadlines_and_cancelled_clients_drop_what_has_not_run(models: ModelSet) -> None:
    dropped: list[int] = []

    class Counts(Observer):
        def cancelled(self, tokens: int) -> None:
            dropped.append(tokens)

    async def work(scheduler: Scheduler, gate: Gate) -> Any:
        held = asyncio.create_task(scheduler.run(models[0], "encode", ["a dog"]))
        await asyncio.sleep(0.05)
        with pytest.raises(DeadlineExceeded, match=r"no result after 0\.05 seconds"):
            await scheduler.run(models[0], "encode", [TEXTS[0]], timeout=0.05)
        leaving = asyncio.create_task(scheduler.run(models[0], "encode", [TEXTS[3]]))
        await asyncio.sleep(0.05)
        leaving.cancel()
        await asyncio.sleep(0.01)
        gate.opened.set()
        await held
        await scheduler.run(models[0], "encode", ["a dog"])
        assert [batch.tokens for batch in gate.batches] == [5, 5]
        assert len(dropped) == 2
        assert scheduler.tokens == 0

    asyncio.run(with_gate(models, work, observer=Counts()))


def test_long_texts_are_cut_windowed_or_rejected_as_asked(models: ModelSet) -> None:
    text = " ".join(TEXTS * 20)
    limit = models[0].predictor.max_length

    async def work(scheduler: Scheduler) -> None:
        cut = await scheduler.run(models[0], "encode", [text], truncate=True)
        assert cut.tokens == limit
        assert (await scheduler.run(models[0], "encode", [text])).tokens > limit
        with pytest.raises(ValueError, match=r"Text 0 has \d+ tokens; this model reads"):
            await scheduler.run(models[0], "encode", [text], truncate=False)
        with pytest.raises(TooLarge, match=r"An input has 1,\d+ tokens; this server reads at most 1,000"):
            await scheduler.run(models[0], "encode", [text * 2])
        with pytest.raises(TooLarge, match="A text has 100,000 characters"):
            await scheduler.run(models[0], "encode", ["a" * 100_000])
        assert (await scheduler.run(models[0], "encode", ["a " * 1_000_000], truncate=True)).tokens == limit
        with pytest.raises(ValueError, match="dimensions is 99"):
            await scheduler.run(models[0], "encode", ["a"], {"dimensions": 99})

    serve(models, work, max_text_tokens=1000)


def test_draining_answers_what_was_accepted_and_nothing_new(models: ModelSet) -> None:
    async def main() -> None:
        scheduler = Scheduler(models, in_thread(models))
        assert not scheduler.is_ready
        await scheduler.start()
        assert scheduler.is_ready
        accepted = [asyncio.create_task(scheduler.run(models[0], "encode", [TEXTS[0]])) for _ in range(50)]
        await asyncio.sleep(0)
        draining = asyncio.create_task(scheduler.drain(10))
        await asyncio.sleep(0)
        assert not scheduler.is_ready
        with pytest.raises(ShuttingDown):
            await scheduler.run(models[0], "encode", [TEXTS[0]])
        assert await draining
        assert all(len(outcome.results) == 1 for outcome in await asyncio.gather(*accepted))

    asyncio.run(main())


def test_a_batch_that_fails_ends_its_requests_only(models: ModelSet) -> None:
    predictor = make_predictor()
    own = ModelSet([ServedModel("model", predictor)])

    async def work(scheduler: Scheduler) -> None:
        def fail(*_: Any) -> None:
            handle.remove()
            raise RuntimeError("out of memory")

        handle = predictor.model.base_model.encoder.layers[0].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            await scheduler.run(own[0], "encode", ["a dog"])
        assert len((await scheduler.run(own[0], "encode", ["a dog"])).results) == 1

    serve(own, work)


# ---------------------------------------------------------------------- processes


def worker_script() -> None:
    """Runs in a process of its own, because it forks: kills a worker while requests are in flight."""
    torch.set_num_threads(1)
    from bertblocks.serve.processes import ProcessRunner, WorkerFactory

    models = ModelSet([ServedModel("model", make_predictor())])
    expected = models[0].predictor.encode(TEXTS)
    factory = WorkerFactory(models, threads=1)
    runners: list[ProcessRunner] = []

    def make(queue: BatchQueue) -> Sequence[threading.Thread]:
        runners.extend(ProcessRunner(models, queue, factory) for _ in range(2))
        return runners

    async def main() -> None:
        scheduler = Scheduler(models, make)
        await scheduler.start()
        outcome = await scheduler.run(models[0], "encode", TEXTS)
        np.testing.assert_allclose(np.stack(outcome.results), expected, atol=1e-6)
        first = [runner.pid for runner in runners]
        calls = [asyncio.create_task(scheduler.run(models[0], "encode", TEXTS * 200)) for _ in range(8)]
        await asyncio.sleep(0.05)
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        ended = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
        lost = [outcome for outcome in ended if isinstance(outcome, WorkerLost)]
        assert lost
        assert all(isinstance(outcome, WorkerLost) or hasattr(outcome, "results") for outcome in ended)
        outcome = await scheduler.run(models[0], "encode", TEXTS)
        np.testing.assert_allclose(np.stack(outcome.results), expected, atol=1e-6)
        assert not {runner.pid for runner in runners} & set(first)
        assert await scheduler.drain(10)
        factory.close()
        for runner in runners:
            while Path(f"/proc/{runner.pid}").exists():
                await asyncio.sleep(0.05)
        print("survived")

    asyncio.run(main())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="worker processes need fork")
def test_a_killed_worker_is_replaced_and_its_requests_end_with_an_error() -> None:
    program = "from tests.serve.test_scheduler import worker_script; worker_script()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["survived"], done.stderr[-2000:]
