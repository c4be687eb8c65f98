"""OpenTelemetry's protocol: what programs send of spans, logs and metrics, as records of ranks."""
