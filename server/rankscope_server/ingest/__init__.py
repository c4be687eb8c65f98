"""From the bytes of a request to rows: every record validated alone, valid ones stored."""
