"""From the bytes of a request to rows: every record judged alone, good ones kept."""
