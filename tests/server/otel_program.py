"""A job of some processes that say what they do by the SDK of OpenTelemetry, and nothing else.

    python otel_program.py ENDPOINT RUN [--slow RANK] [--steps N] [--style STYLE]

Each step loads, goes forward and backward, meets the others and updates. How long that takes is
worked out and not waited for, the same in each process: the ranks leave an all_reduce when the last
one has come. So it is known which rank holds up which, on whatever machine this runs. Styles:
`plain` names its spans as most programs do, `no-waits` has no span of what ranks wait in, `updates`
has none of steps, `one-logger` calls NVIDIA's logger of training, as Megatron-LM and NeMo do.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import time
from collections.abc import Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

LOAD_MS, FORWARD_MS, BACKWARD_MS, REDUCE_MS, UPDATE_MS = 2.0, 60.0, 100.0, 8.0, 20.0
SLOW = 1.5  # times as long in its forward pass
EXPORT_EVERY = 37  # spans: most requests end in the middle of a step
SECRET = "aB3dE6gH9jK2mN5p"
_MS = 1_000_000


class Spans:
    """The SDK itself; a request after so many spans, as the queue of the SDK drops what is more."""

    def __init__(self, endpoint: str, resource: Resource) -> None:
        self._provider = TracerProvider(resource=resource)
        exporter = OTLPSpanExporter(f"{endpoint}/v1/traces", compression=Compression.Gzip)
        self._processor = BatchSpanProcessor(exporter, schedule_delay_millis=3_600_000)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("trainer")
        self._open: list[trace.Span] = []
        self._count = 0

    def begin(self, name: str, at_ns: int, **attributes: Any) -> trace.Span:
        """Begin a span inside of the newest that is open."""
        around = trace.set_span_in_context(self._open[-1]) if self._open else None
        span = self._tracer.start_span(name, around, attributes=attributes, start_time=at_ns)
        self._open.append(span)
        return span

    def end(self, at_ns: int) -> None:
        """End the newest span."""
        self._open.pop().end(at_ns)
        self._count += 1
        if self._count % EXPORT_EVERY == 0:
            self._processor.force_flush()

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


class OneLogger:
    """NVIDIA's logger, with its own exporter of OpenTelemetry."""

    def __init__(self, endpoint: str, ranks: int) -> None:
        from nv_one_logger.api.config import OneLoggerConfig
        from nv_one_logger.otel.exporter.otel_exporter import OTelExporter
        from nv_one_logger.recorder.default_recorder import ExportCustomizationMode
        from nv_one_logger.training_telemetry.api import callbacks
        from nv_one_logger.training_telemetry.api.config import TrainingTelemetryConfig
        from nv_one_logger.training_telemetry.api.spans import StandardTrainingJobSpanName
        from nv_one_logger.training_telemetry.api.training_telemetry_provider import (
            TrainingTelemetryProvider,
        )

        config = OneLoggerConfig(
            application_name="trainer", world_size_or_fn=ranks, session_tag_or_fn="a session"
        )
        self._provider = TrainingTelemetryProvider.instance()
        exporter = OTelExporter(OTLPSpanExporter(f"{endpoint}/v1/traces"))
        # by itself it exports no spans of steps and phases
        mode = ExportCustomizationMode.BLACKLIST_SPANS
        self._provider.with_base_config(config).with_exporter(exporter)
        left_out = [StandardTrainingJobSpanName.ZERO_GRAD]
        self._provider.with_export_customization(mode, left_out).configure_provider()
        self._callbacks = callbacks
        self._names = {str(name): name for name in StandardTrainingJobSpanName}
        self._telemetry = TrainingTelemetryConfig(
            perf_tag_or_fn="tag", global_batch_size_or_fn=32, log_every_n_train_iterations=50
        )
        self._open: list[Any] = []

    def begin(self, name: str, at_ns: int, **attributes: Any) -> None:
        """Begin a span, those of the whole and of steps by the callbacks."""
        if name == "training_run":
            self._callbacks.on_app_start(at_ns / _MS)
            self._provider.set_training_telemetry_config(self._telemetry)
            self._callbacks.on_train_start(train_iterations_start=0, start_time_msec=at_ns / _MS)
            self._open.append(name)
        elif name == "train_step":
            self._callbacks.on_training_single_iteration_start(at_ns / _MS)
            self._open.append(name)
        elif name in self._names:  # collectives have none
            recorder = self._provider.recorder
            self._open.append(recorder.start(self._names[name], start_time=_stamp(at_ns)))
        else:
            self._open.append(None)

    def end(self, at_ns: int) -> None:
        """End the newest span."""
        span = self._open.pop()
        if span == "training_run":
            self._callbacks.on_train_end(at_ns / _MS)
            self._callbacks.on_app_end(at_ns / _MS)
        elif span == "train_step":
            self._callbacks.on_training_single_iteration_end(at_ns / _MS)
        elif span is not None:
            self._provider.recorder.stop(span, stop_time=_stamp(at_ns))

    def close(self) -> None:
        """Do nothing: its end of the application sends what is left."""


def _stamp(at_ns: int) -> Any:
    from nv_one_logger.core.time import TracingTimestamp

    return TracingTimestamp.for_timestamp(at_ns / 1e9)


def train(rank: int, asked: argparse.Namespace, spans: Spans | OneLogger, begin_ns: int) -> int:
    """Say what one rank does in all steps; return when it is done."""
    chance = random.Random(0)  # the same in each rank
    now, has_steps = begin_ns, asked.style != "updates"
    for number in range(asked.steps):
        came = []
        for other in range(asked.ranks):
            slow = SLOW if other == asked.slow else 1.0
            parts = [LOAD_MS, FORWARD_MS * slow, BACKWARD_MS]
            came.append([int(part * chance.uniform(0.98, 1.02) * _MS) for part in parts])
        left = now + max(map(sum, came)) + int(REDUCE_MS * _MS)
        load, forward, backward = came[rank]
        if has_steps:
            spans.begin("train_step", now, step=number)
        one(spans, "data_loading", now, now + load)
        one(spans, "model_forward", now + load, now + load + forward)
        at = now + load + forward
        spans.begin("model_backward", at)
        if asked.style != "no-waits":
            about = {"size_bytes": 1 << 20, "dtype": "torch.float32"}
            one(spans, "all_reduce", at + backward, left, **about)
        spans.end(left)
        now = left + int(UPDATE_MS * _MS)
        one(spans, "optimizer_update" if has_steps else "AdamW.step", left, now)
        if has_steps:
            spans.end(now)
    return now


def one(spans: Spans | OneLogger, name: str, begin_ns: int, end_ns: int, **attributes: Any) -> None:
    """Say that a rank did something."""
    spans.begin(name, begin_ns, **attributes)
    spans.end(end_ns)


def main(rank: int, asked: argparse.Namespace, begin_ns: int) -> None:
    """One rank."""
    logging.disable()  # the exporters tell every refusal
    about = {
        "service.name": "trainer", "rankscope.run": asked.run, "rank": rank,
        "world_size": asked.ranks, "local_rank": rank % 2, "host.name": f"node-{rank // 2}",
    }  # fmt: skip
    # NVIDIA's logger makes its resource itself: of this variable, as users set it
    os.environ["OTEL_RESOURCE_ATTRIBUTES"] = ",".join(f"{k}={v}" for k, v in about.items())
    os.environ["RANK"] = str(rank)
    resource = Resource.create()
    lines, meters = said_beside(asked, resource, begin_ns)
    is_nvidia = asked.style == "one-logger"
    spans = OneLogger(asked.endpoint, asked.ranks) if is_nvidia else Spans(asked.endpoint, resource)
    whole = spans.begin("training_run", begin_ns - _MS, model="tiny")
    end_ns = train(rank, asked, spans, begin_ns)
    one(spans, "checkpoint_save", end_ns, end_ns + 900 * _MS)
    one(spans, "tidying up", end_ns, end_ns + 5 * _MS, password=SECRET)
    if rank == asked.fails and whole is not None:
        whole.record_exception(MemoryError("CUDA out of memory"), timestamp=end_ns)
        whole.set_status(trace.Status(trace.StatusCode.ERROR, "out of memory"))
    spans.end(end_ns + 1_000 * _MS)
    for each in (spans.close, lines.shutdown, meters.shutdown):
        each()


def said_beside(
    asked: argparse.Namespace, resource: Resource, begin_ns: int
) -> tuple[LoggerProvider, MeterProvider]:
    """Send a line with a secret, and numbers of the first steps."""
    lines = LoggerProvider(resource=resource)
    exporter = OTLPLogExporter(f"{asked.endpoint}/v1/logs")
    lines.add_log_record_processor(BatchLogRecordProcessor(exporter))
    record = LogRecord(
        timestamp=begin_ns, body=f"training begins with API_KEY={SECRET}",
        severity_number=SeverityNumber.WARN, attributes={"step": 1},
        trace_id=0x1234, span_id=0x56, trace_flags=trace.TraceFlags(1),
    )  # fmt: skip
    lines.get_logger("trainer.setup").emit(record)
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(f"{asked.endpoint}/v1/metrics"))
    meters = MeterProvider([reader], resource)
    meter = meters.get_meter("trainer")
    loss, sizes = meter.create_gauge("train.loss"), meter.create_histogram("message.size")
    for step in range(1, 11):
        loss.set(1.0 / step, {"step": step})
        sizes.record(100.0 * step, {"step": 1})
    return lines, meters


def run(arguments: Sequence[str] | None = None) -> None:
    """Start the ranks and wait for them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("run")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--slow", type=int, default=-1)
    parser.add_argument("--fails", type=int, default=-1)
    styles = ["plain", "no-waits", "updates", "one-logger"]
    parser.add_argument("--style", default="plain", choices=styles)
    asked = parser.parse_args(arguments)
    length_ms = LOAD_MS + FORWARD_MS * SLOW + BACKWARD_MS + REDUCE_MS + UPDATE_MS
    begin_ns = time.time_ns() - int(asked.steps * length_ms * _MS)
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=main, args=(rank, asked, begin_ns)) for rank in range(asked.ranks)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"exit codes {[process.exitcode for process in ranks]}")


if __name__ == "__main__":
    run()
