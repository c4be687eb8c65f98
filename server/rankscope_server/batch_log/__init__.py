"""The way of a batch from its request into the store: at once, or by a log that workers read."""
