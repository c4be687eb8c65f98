"""What happens once a batch is in the store, whichever way it came: looks, hints, counters."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope_server.analysis.loop import AnalysisLoop
from rankscope_server.api.counters import Counters
from rankscope_server.broker import Broker
from rankscope_server.ingest.batch import ValidatedBatch
from rankscope_server.store.batches import Stored


@dataclass(frozen=True, slots=True)
class Announcer:
    """Says to the other parts of the server that a batch is durable."""

    analysis: AnalysisLoop
    broker: Broker
    counters: Counters

    def stored(self, batch: ValidatedBatch, stored: Stored) -> None:
        """Hand a durable batch to the analysis, hint at it on the stream, and count it."""
        counters = self.counters
        if stored.duplicate:
            counters.duplicates.inc()
            return
        self.analysis.feed(batch.run_id, stored.batch_id, batch.records, batch.chunks)
        self.broker.publish(f"run:{batch.run_id}", stored.changed, stored.step or None)
        self.broker.publish("runs", {"runs"}, None)
        counters.batches.inc()
        counters.records.inc(len(batch.records))
        counters.chunks.inc(len(batch.chunks))
        counters.events.inc(sum(part.chunk.count for part in batch.chunks))
        counters.refused.inc(len(batch.refused))
        counters.bytes.inc(batch.num_bytes)
