"""Part of Rankscope: server."""
