"""Who waits for whom: the page of hangs."""
