"""What goes over the wire, and what both of its ends compute alike. Imports nothing of ours."""
