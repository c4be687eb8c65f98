"""Writes what a tracker's own reader finds in its store, one JSON object.

    python tracked_read.py TRACKER STORE

`runs` has each run by its name: `numbers`, by name the pairs of step and value; `texts`; `id`.
"""

import json
import os
import struct
import sys
import zipfile
from pathlib import Path


def mlflow(store):
    from mlflow import MlflowClient

    client = MlflowClient(store)
    history = client.get_metric_history
    runs = {}
    for run in client.search_runs([e.experiment_id for e in client.search_experiments()]):
        numbers = {
            name: sorted((m.step, m.value) for m in history(run.info.run_id, name))
            for name in run.data.metrics
        }
        texts = {name: text for name, text in run.data.tags.items() if name[:6] != "mlflow"}
        texts["state"] = run.info.status
        runs[run.info.run_name] = {"id": run.info.run_id, "numbers": numbers, "texts": texts}
    return runs


def wandb(store):
    """The records of offline runs. W&B reads them in Go alone: here by its own messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    runs = {}
    for path in sorted(Path(store).glob("offline-run-*/*.wandb")):
        found = {"id": "", "numbers": {}, "texts": {}}
        name = ""
        for data in _of_a_log(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                name, found["id"] = record.run.display_name, record.run.run_id
                found["texts"]["project"] = record.run.project
                _config(found, record.run.config.update)
            elif kind == "config":
                _config(found, record.config.update)
            elif kind == "history":
                items = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                for key, value in items.items():
                    if key[:1] != "_":
                        pairs = found["numbers"].setdefault(key, [])
                        pairs.append((record.history.step.num, value))
            elif kind == "summary":
                for item in record.summary.update:
                    key = item.key or ".".join(item.nested_key)
                    found["texts"][key] = json.loads(item.value_json)
        runs[name] = found
    return runs


def _of_a_log(data):
    """Yield what a log of LevelDB holds, behind the seven bytes of W&B.

    As `doc/log_format` of github.com/google/leveldb has it: blocks of 32 KiB, each part of a record
    with checksum, length and kind (1 whole, 2 first, 3 middle, 4 last).
    """
    at, record = 7, b""
    while at + 7 <= len(data):
        left = 32_768 - at % 32_768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if kind == 0:
            return
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def _config(found, items):
    for item in items:
        if (item.key or item.nested_key[0]) == "rankscope":
            found["texts"]["config"] = json.loads(item.value_json)


def tensorboard(store):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs = {}
    for folder in sorted({path.parent for path in Path(store).rglob("events.*")}):
        events = EventAccumulator(str(folder), {"scalars": 0, "tensors": 0}).Reload()
        scalars = {
            name: [(event.step, event.value) for event in events.Scalars(name)]
            for name in events.Tags()["scalars"]
        }
        texts = {
            name: events.Tensors(name)[-1].tensor_proto.string_val[0].decode()
            for name in events.Tags()["tensors"]
        }
        name = str(folder.relative_to(store))
        runs[name] = {"id": str(folder), "numbers": scalars, "texts": texts}
    return runs


def trackio(store):
    os.environ["TRACKIO_DIR"] = store
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    runs = {}
    for run in trackio.Api().runs("characters"):
        rows = SQLiteStorage.get_logs("characters", run.name, run_id=run.id)
        numbers, texts = {}, {"config": (run.config or {}).get("rankscope")}
        for row in rows:
            for key, value in row.items():
                if isinstance(value, int | float) and key not in ("step", "timestamp"):
                    numbers.setdefault(key, []).append((row["step"], value))
                elif isinstance(value, dict):
                    texts[key] = value
        texts["alerts"] = [alert["title"] for alert in run.alerts()]
        runs[run.name] = {"id": run.id, "numbers": numbers, "texts": texts}
    return runs


def swanlab(store):
    """The records of offline runs, as `swanlab sync` reads them."""
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    runs = {}
    for path in sorted(Path(store).glob("run-*/*.swanlab")):
        config = yaml.safe_load((path.parent / "files" / "config.yaml").read_text() or "{}") or {}
        texts = {"config": (config.get("rankscope") or {}).get("value")}
        found = {"id": path.stem.removeprefix("run-"), "numbers": {}, "texts": texts}
        reader, name = DataStoreReader(), path.stem
        reader.open(path)
        for data in reader:
            record = Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "start":
                name, texts["project"] = record.start.name, record.start.project
            elif kind == "scalar":
                pairs = found["numbers"].setdefault(record.scalar.key, [])
                pairs.append((record.scalar.step, record.scalar.value.number))
        texts["written"] = [each.read_text() for each in path.parent.glob("media/text/*.txt")]
        runs[name] = found
    return runs


def comet(store):
    """The messages of offline archives, as `comet upload` sends them."""
    runs = {}
    for path in sorted(Path(store).glob("*.zip")):
        with zipfile.ZipFile(path) as archive:
            lines = archive.read("messages.json").decode().splitlines()
            facts = json.loads(archive.read("experiment.json"))
        found = {"id": facts["offline_id"], "numbers": {}, "texts": {}}
        found["texts"]["project"] = facts["project_name"]
        for message in map(json.loads, lines):
            said = message["payload"]
            if message["type"] == "metric_msg" and said["metric"]["step"] is not None:
                pairs = found["numbers"].setdefault(said["metric"]["metricName"], [])
                pairs.append((said["metric"]["step"], said["metric"]["metricValue"]))
            elif message["type"] == "log_other":
                found["texts"][said["key"]] = said["value"]
        runs[found["texts"].get("Name", "owl")] = found
    return runs


if __name__ == "__main__":
    sys.stdout.write(json.dumps(globals()[sys.argv[1]](sys.argv[2])) + "\n")
