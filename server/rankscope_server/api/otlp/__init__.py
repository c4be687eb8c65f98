"""POST /v1/traces, /v1/logs, /v1/metrics: OpenTelemetry's protocol over HTTP."""
