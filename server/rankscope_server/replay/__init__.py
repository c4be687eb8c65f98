"""Steps as graphs of work and transfers that can be run again without a fault."""
