"""The training loop: any task, on one process or many, with bit-exact resume."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from transformers import PreTrainedModel

from bertblocks.core.cpu import kept_memory
from bertblocks.core.environment import peak_memory
from bertblocks.core.log import logger
from bertblocks.core.metrics_file import MetricsFile
from bertblocks.core.tensor_files import save_tensors
from bertblocks.nn.ops.gpu import describe_gpu, use_flash_implementation
from bertblocks.training.anomalies import find_anomaly
from bertblocks.training.backward import BackwardPass
from bertblocks.training.checkpoints import CheckpointFolder
from bertblocks.training.compilation import checkpoint_layers, compile_model, make_deterministic
from bertblocks.training.distributed import World, parallelize, reshard, to_full, unshard
from bertblocks.training.ema import WeightAverage
from bertblocks.training.optimizers import gradient_values
from bertblocks.training.precision import choose_precision
from bertblocks.training.prefetch import PreparedStep, prefetch
from bertblocks.training.process_times import ProcessTimes
from bertblocks.training.profiling import profile_steps
from bertblocks.training.progress import Progress
from bertblocks.training.routing import RoutingMetrics
from bertblocks.training.saving import CheckpointWriter
from bertblocks.training.sections import Run
from bertblocks.training.state import BestEvaluation, Snapshot, TrainState, copy_weights, mean_weights, restore
from bertblocks.training.step_results import StepResult, StepResults, sum_over_processes
from bertblocks.training.task import TrainingTask
from bertblocks.training.trackers import Tracker
from bertblocks.training.watchdog import Watchdog


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm of a step is not finite or a spike. It is not taken, and its batch is saved."""


@dataclass(frozen=True)
class Outcome:
    """How training ended: after the last step or the end of its time, by early stopping, or by a signal."""

    state: TrainState
    signal: int | None
    #: Metrics of the last evaluation.
    evaluation: dict[str, float]


@dataclass(frozen=True)
class ModelSelection:
    """The metric that selects the best checkpoint, and the early-stopping patience in evaluations."""

    metric: str
    higher_is_better: bool = True
    patience: int | None = None
    #: Whether the later of two equally good evaluations is the best, unless the earlier one is that of the start (step
    #: 0). Early stopping does not count it as better.
    prefers_later: bool = False


class Trainer:
    """Trains a model on a task in a run folder, resuming from the newest complete checkpoint there.

    `start` are the metrics of the untrained model, if they are already known. `write_extras` adds files to each
    checkpoint, such as the tokenizer and the recipe.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        task: TrainingTask,
        optimizers: Callable[[nn.Module], list[Optimizer]],
        run: Run,
        folder: Path,
        world: World,
        progress: Progress,
        clip: float | None = None,
        selection: ModelSelection | None = None,
        trackers: list[Tracker] | None = None,
        start: dict[str, float] | None = None,
        write_extras: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        self.task, self.run, self.folder, self.world = task, run, folder, world
        self.progress, self.clip, self.selection = progress, clip, selection
        self.trackers = (trackers or []) if world.is_main else []
        self.start, self.write_extras = start, write_extras
        self.checkpoints = CheckpointFolder(folder / "checkpoints", run.checkpoints.kept, run.checkpoints.milestones)
        self.model: Any = cast(Any, model).to(world.device)
        self.model.config.architectures = [type(model).__name__]
        checkpoint_layers(self.model, run.gradient_checkpointing)
        if world.device.type == "cuda" and run.deterministic:
            make_deterministic()
        if run.flash_attention is not None:
            use_flash_implementation(run.flash_attention, describe_gpu(world.device))
        self.parallel_model = parallelize(self.model, world, run.parallel, task.has_unused_weights, run.shard_over)
        self.is_sharded = isinstance(self.parallel_model, FSDPModule)
        self.writer = CheckpointWriter(self.checkpoints, world, self.is_sharded)
        self.optimizers = optimizers(self.model)
        self.ema = WeightAverage(self.model, run.ema) if run.ema else None
        precision = choose_precision(run.precision, world.device)
        if run.compile:
            compile_model(self.model, precision, run.activation_memory_budget)
        self.state = TrainState(position=task.initial_position(), precision=precision)
        self.routing = RoutingMetrics(self.model)
        self.evaluation: dict[str, float] = {}
        self.times = ProcessTimes(self.model, world)
        self._received = 0
        self._signal: int | None = None

    # ------------------------------------------------------------------ the run

    def train(self, config: dict[str, Any] | None = None) -> Outcome:
        """Trains until the last step, the end of its time, a signal or early stopping. Trackers get `config`."""
        self._resume()
        self.scaler = torch.amp.GradScaler(self.world.device.type, enabled=self.state.precision == "fp16")
        if self.state.scaler:
            self.scaler.load_state_dict(self.state.scaler)
        # the scaler of fp16 reads the device in every step anyway
        can_wait = self.run.anomalies.only_stop_the_run and not self.scaler.is_enabled()
        self.results = StepResults(is_late=self.world.device.type != "cpu" and can_wait)
        if self.world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.metrics = MetricsFile(self.folder / "metrics.jsonl", self.state.step)
        for tracker in self.trackers:
            tracker.start(config or {}, self.state.step)
        with contextlib.ExitStack() as stack:
            stack.enter_context(kept_memory())
            stack.callback(self.writer.close)
            self.watchdog = stack.enter_context(Watchdog(self.world, self.run.hang_after))
            stack.enter_context(self.times)
            stack.enter_context(self._signals())
            stack.enter_context(self.progress)
            if self.world.is_main:
                stack.callback(self.metrics.close)
            for tracker in self.trackers:
                stack.callback(tracker.close)
            batches = stack.enter_context(prefetch(self.task, self.world, self.state.step, self.state.position))
            profile = self.run.profile if self.world.is_main else None
            after_step = stack.enter_context(profile_steps(self.folder / "profile", profile))
            if self.state.step == 0 and self.run.evaluation.every:
                self._evaluate_start()
            self._steps(batches, after_step)
            self.writer.wait()
        return Outcome(self.state, self._signal, self.evaluation)

    def _steps(self, batches: Iterator[PreparedStep], after_step: Callable[[], None]) -> None:
        run, state = self.run, self.state
        saved = state.step
        is_over = self._should_stop_early()
        while not self._is_finished() and not is_over and self._signal is None:
            self.watchdog.beat(state.step)
            started = time.perf_counter()
            prepared = next(batches)
            self.times.add_step(waited=time.perf_counter() - started)
            result = self._step(prepared)
            after_step()
            self._read_results(before=result)
            state.step, state.position = prepared.step + 1, prepared.next_position
            seconds = time.perf_counter() - started
            if self.task.budget is not None:  # processes follow the main one's clock, to agree on when it is used up
                (seconds,) = self.world.sum([seconds if self.world.is_main else 0.0])
            state.seconds += seconds
            result.seconds = seconds
            is_last = self._is_finished()
            if is_last or not self.results.is_late:
                self._read_results()
            if is_last or (run.evaluation.every and state.step % run.evaluation.every == 0):
                self.watchdog.beat(state.step)
                is_over = self._evaluate()
            is_best = state.best is not None and state.best.step == state.step
            periods = (run.checkpoints.every, run.checkpoints.milestones)
            is_due = any(period and state.step % period == 0 for period in periods)
            if is_last or is_over or is_best or self._signal or is_due:
                self._save()
                saved = state.step
        if saved < state.step:
            self._save()

    def _is_finished(self) -> bool:
        budget = self.task.budget
        return self.state.step >= self.task.total_steps or (budget is not None and self.state.seconds >= budget)

    def _resume(self) -> None:
        latest = self.world.from_main(self.checkpoints.find_latest)
        for problem in latest.problems:
            fallback = "resuming from the previous one" if latest.path else "there is no other, so the run starts again"
            if self.world.is_main:
                logger.warning(f"{problem}; {fallback}.")
        if latest.path is not None:
            wanted = self.state.precision
            self.state = restore(latest.path, self.model, self.optimizers, self.ema)
            if self.run.precision != "auto":
                self.state.precision = wanted
            if self.state.step:
                # a finished run keeps the model of its last step
                self.task.before_step(self.model, self.state.step - 1)
            self.progress.print(f"Resuming from {latest.path}.")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C end the run after the current step; a second Ctrl-C ends it at once.

        A second SIGTERM does not, because torchrun forwards the one that a cluster has already sent to every process.
        Python allows signal handlers in the main thread only; in other threads signals keep their usual effect.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, _: object) -> None:
            self._received = number
            if number == signal.SIGINT:
                signal.signal(number, signal.default_int_handler)

        numbers = (signal.SIGTERM, signal.SIGINT)
        before = [signal.signal(number, note) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    # ------------------------------------------------------------------ one step

    def _step(self, prepared: PreparedStep) -> StepResult:
        """Launches forward and backward on this process's part of a global batch, and the update of the weights."""
        step, world = prepared.step, self.world
        self.task.before_step(self.model, step)
        self.model.train()
        terms = sorted(prepared.batches[0].counts)
        counts = [sum(batch.counts[term] for batch in prepared.batches) for term in terms]
        *counts, tokens = map(int, world.sum([*counts, sum(batch.input_ids.numel() for batch in prepared.batches)]))
        totals = dict(zip(terms, counts, strict=True))
        options = (self.state.precision, self.scaler, self.run.seed, step, totals, self.routing.add)
        sums = BackwardPass(self.task, self.parallel_model, world, *options).run(prepared.batches)
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        gradients = gradient_values(self.model.parameters())
        norm = to_full(torch.nn.utils.get_total_norm(gradients))
        flag = torch.full((1,), float(self._received > 0), device=sums.device)
        values = torch.cat([sum_over_processes(torch.cat([sums, flag])), norm.double().view(1)])
        rate = self.state.learning_rate = self.task.learning_rate(step, self.state.seconds)
        self.results.add(result := StepResult(prepared, terms, tokens, rate, values))
        if self.results.is_late or self._is_sound(result):
            self._update(step, norm, gradients)
        return result

    def _update(self, step: int, norm: Tensor, gradients: list[Tensor]) -> None:
        """Clips gradients and changes the weights."""
        is_late = self.results.is_late  # the host does not know the norm yet; a factor of 1 changes no gradient
        if self.clip is not None and (is_late or norm > self.clip):
            torch._foreach_mul_(gradients, (self.clip / (norm + 1e-6)).clamp(max=1.0))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.state.learning_rate * group.get("rate_scale", 1.0)
            # in fp16, an overflow from too large a loss scale skips the step in all optimizers
            if is_late or math.isfinite(norm):
                self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()
        if callable(renormalize := getattr(self.model, "renormalize_weights", None)):
            renormalize()
        if self.ema is not None:
            self.ema.update(step)

    def _is_sound(self, result: StepResult) -> bool:
        """Checks a step. One that is an anomaly stops the run or is skipped, with the weights as they are or as before.

        On a GPU the next step is under way then, and the run can only stop; no checkpoint contains either step.
        """
        norm = 0.0 if self.scaler.is_enabled() else result.norm  # in fp16 an overflow only lowers the loss scale
        anomaly = find_anomaly(result.loss, norm, result.prepared.step, self.state, self.run.anomalies)
        if anomaly is None:
            return True
        (action, problem), limit = anomaly, self.run.anomalies.limit
        if action == "stop" or self.state.skipped >= limit:
            reason = "" if action == "stop" else f" Already {limit} steps were skipped (run.anomalies.limit)."
            self._stop(problem, reason, result.prepared)
        result.is_skipped = True
        self.state.skipped += 1
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.scaler.update()
        if action == "rewind":
            problem += f"; the weights go back to {self._rewind()}"
        if self.world.is_main:
            logger.warning(f"{problem}; the step was skipped.")
        return False

    def _rewind(self) -> str:
        """Restores weights and optimizer from the newest checkpoint that every run of this recipe writes."""
        self.writer.wait()
        every = self.run.checkpoints.every
        latest = self.world.from_main(lambda: self.checkpoints.find_latest(lambda step: step % every == 0))
        if latest.path is None:
            return "nothing, because no checkpoint was written yet"
        restore(latest.path, self.model, self.optimizers, self.ema)
        return latest.path.name

    def _stop(self, problem: str, reason: str, prepared: PreparedStep) -> None:
        """Saves this process's part of the batch and raises an error."""
        step = prepared.step
        file = self.folder / f"not-finite-step-{step + 1:08d}-process-{self.world.rank}.safetensors"
        tensors = {
            f"{number}.{name}": value.cpu()
            for number, batch in enumerate(prepared.batches)
            for name, value in vars(batch).items()
            if isinstance(value, Tensor)
        }
        save_tensors(tensors, file)
        outcome = "no checkpoint contains the step" if self.results.is_late else "the step was not taken"
        raise NonFiniteError(f"{problem}; {outcome}. Its batch is saved in {file}.{reason}")

    # ------------------------------------------------------------------ metrics, evaluation and checkpoints

    def _read_results(self, before: StepResult | None = None) -> None:
        """Checks and logs the steps that were launched, or those launched before one."""
        for result in self.results.read(before):
            if self.results.is_late:
                self._is_sound(result)
            self._signal = (self._received or signal.SIGTERM) if result.received_signal else self._signal
            self._accumulate(result)
            self._log(result)

    def _accumulate(self, result: StepResult) -> None:
        """Adds a step to the sums for the next line of metrics."""
        step, means = result.prepared.step, {} if result.is_skipped else result.means
        self.state.tokens += result.tokens
        slots = self.task.step_info(step).get("slots", 0)
        added: dict[str, float] = {"steps": 1, "tokens": result.tokens, "slots": slots, "seconds": result.seconds}
        added |= {"skipped": 1} if result.is_skipped else {"gradient_norm": result.norm}
        is_side = self.task.is_side_step(step)
        if not is_side and means:
            added["loss"] = sum(means.values())
        if is_side or len(means) > 1:
            added |= {f"loss_{term}": mean for term, mean in means.items()}
        added |= {f"steps with {key}": 1 for key in added if key.startswith("loss")}
        for key, value in added.items():
            self.state.window[key] = self.state.window.get(key, 0.0) + value

    def _log(self, result: StepResult) -> None:
        state, window, step = self.state, self.state.window, result.prepared.step + 1
        is_due = step % self.run.log_every == 0 or (step == state.step and self._is_finished())
        if is_due:
            self.routing.move_to(window, self.world)
        steps, seconds = window["steps"], max(window["seconds"], 1e-9)
        taken = max(steps - window.get("skipped", 0), 1)
        losses = {key: value for key, value in window.items() if key.startswith("loss")}
        line: dict[str, Any] = {
            "step": step,
            "tokens": state.tokens,
            **{key: value / taken for key, value in window.items() if key.startswith(("gradient", "router"))},
            **{key: value / window.get(f"steps with {key}", steps) for key, value in losses.items()},
            "learning_rate": result.learning_rate,
            "tokens_per_second": window["tokens"] / seconds,
        }
        if (memory := peak_memory(self.world.device)) is not None:
            line["memory"] = memory
        if window["slots"]:
            line["packing"] = window["tokens"] / window["slots"]
        line |= {key: value for key, value in self.task.step_info(step - 1).items() if key != "slots"}
        seconds_left = (self.task.total_steps - step) * seconds / steps
        if self.task.budget is not None:
            seconds_left = min(seconds_left, max(self.task.budget - state.seconds, 0.0))
        self.progress.update(step, self.task.total_steps, {**line, "seconds_left": seconds_left})
        if is_due:
            skipped = {"skipped_steps": window["skipped"]} if "skipped" in window else {}
            self._write({**line, **self.times.compare(step, seconds), **skipped, "seconds": state.seconds})
            window.clear()

    def _write(self, line: dict[str, Any]) -> None:
        if not self.world.is_main:
            return
        self.metrics.write(line)
        numbers = {key: value for key, value in line.items() if isinstance(value, (int, float)) and key != "step"}
        for tracker in self.trackers:
            tracker.log(line["step"], numbers)

    def _evaluate_start(self) -> None:
        """Records the metrics of the untrained model, where curves begin. They select nothing."""
        scores = self.start
        if scores is None:
            with self.evaluation_weights():
                scores = self.task.evaluate(self.model)
        if scores:
            self._write({"step": 0, **scores})

    def _evaluate(self) -> bool:
        """Evaluates the model, or its moving average. Returns True if training should stop early."""
        self._read_results()
        with self.evaluation_weights():
            self.evaluation = self.task.evaluate(self.model)
        if not self.evaluation:
            return False
        self._write({"step": self.state.step, **self.evaluation})
        metric = None if self.selection is None else self.selection.metric
        self.progress.show_evaluation(self.state.step, self.evaluation, metric)
        if self.selection is not None:
            self._select(self.evaluation[self.selection.metric], self.selection)
        return self._should_stop_early()

    def _select(self, value: float, selection: ModelSelection) -> None:
        best = self.state.best
        sign = 1 if selection.higher_is_better else -1
        if best is None or sign * value > sign * best.value:
            self.state.best = BestEvaluation(self.state.step, value)
        else:
            best.evaluations_since += 1
            if selection.prefers_later and value == best.value and best.step > 0:
                best.step = self.state.step

    def _should_stop_early(self) -> bool:
        patience = self.selection.patience if self.selection else None
        best = self.state.best
        return patience is not None and best is not None and best.evaluations_since >= patience

    @contextlib.contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """The model as users get it: in evaluation mode, with averaged weights if the run keeps them."""
        self.model.eval()
        with torch.no_grad(), self.ema.applied() if self.ema else contextlib.nullcontext():
            unshard(self.model)
            yield
            reshard(self.model)

    def average_checkpoints(self, count: int) -> None:
        """Gives the model the mean weights of the last checkpoints."""
        steps = self.checkpoints.steps()[-count:]
        copy_weights(mean_weights([self.checkpoints.path / f"step-{step:08d}" for step in steps]), self.model)

    def _save(self) -> None:
        self._read_results()
        state = self.state
        self.routing.move_to(state.window, self.world)
        state.scaler = self.scaler.state_dict()
        state.random = {"seed": self.run.seed, "step": state.step}
        self.writer.wait()
        snapshot = None
        if self.is_sharded or self.world.is_main:
            snapshot = Snapshot(self.model, self.optimizers, self.ema, self.is_sharded)
        if self.world.is_main:
            self.metrics.flush()
        self.writer.save(snapshot, state, self.write_extras, protected=state.best.step if state.best else None)
