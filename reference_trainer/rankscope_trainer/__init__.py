"""Part of Rankscope: trainer."""
