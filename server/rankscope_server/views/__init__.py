"""From stored rows to answers: pure of HTTP, one module per page."""
