"""What was communicated: how long, how fast, who arrives last, over which links."""
