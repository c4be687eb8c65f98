"""How reports get from node to node: discovery and carriers."""
